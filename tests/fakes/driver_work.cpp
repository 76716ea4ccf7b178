// The simulated CUDA driver: copies, streams, events.
#include <algorithm>

#include "driver_entry.hpp"

namespace edgeyolo::fake {

// The pinned allocation around a host range (null: pageable), or a refusal.
static int host_side(const Entry& entry, const void* pointer, std::size_t bytes, const StreamRef& stream,
                     AllocationRef& pinned) {
    if (is_device_address(reinterpret_cast<std::uint64_t>(pointer)))
        return refuse(invalid_value, std::string(entry.call) + ": a device address where host memory is expected");
    pinned = find_pinned(pointer);
    if (pinned) {
        const std::uint8_t* end = static_cast<const std::uint8_t*>(pointer) + bytes;
        if (end > pinned->storage.get() + pinned->bytes)
            return refuse(invalid_value, std::string(entry.call) + ": out of bounds of pinned memory");
    } else if (stream->capture) {
        return refuse(invalidate(*stream->capture), std::string(entry.call) + ": pageable memory in a capture");
    } else {
        return unsafe_during_capture();  // such a copy waits
    }
    return ok;
}

int cuMemcpyHtoDAsync(DevicePtr to, const void* from, std::size_t bytes, StreamHandle handle) {
    BEGIN(cuMemcpyHtoDAsync);
    CURRENT(ordinal);
    STREAM(stream, handle, ordinal);
    AllocationRef pinned;
    if (const int refused = host_side(entry, from, bytes, stream, pinned)) return refused;
    std::shared_ptr<std::vector<std::uint8_t>> staged;  // pageable memory is read now
    if (!pinned) {
        const auto* bytes_from = static_cast<const std::uint8_t*>(from);
        staged = std::make_shared<std::vector<std::uint8_t>>(bytes_from, bytes_from + bytes);
    }
    return submit(stream, make_work(entry.call, [=](const Access& access) {
                      void* target = access.host(to, bytes);
                      if (pinned) access.keep(pinned);
                      std::memcpy(target, staged ? staged->data() : from, bytes);
                  }));
}

int cuMemcpyDtoHAsync(void* to, DevicePtr from, std::size_t bytes, StreamHandle handle) {
    BEGIN(cuMemcpyDtoHAsync);
    CURRENT(ordinal);
    STREAM(stream, handle, ordinal);
    AllocationRef pinned;
    if (const int refused = host_side(entry, to, bytes, stream, pinned)) return refused;
    const int code = submit(stream, make_work(entry.call, [=](const Access& access) {
                                const void* source = access.host(from, bytes);
                                if (pinned) access.keep(pinned);
                                std::memcpy(to, source, bytes);
                            }));
    if (code || pinned) return code;
    drain(entry.lock, *stream);  // into pageable memory: synchronous
    return device(ordinal).lost;
}

int cuMemcpyDtoDAsync(DevicePtr to, DevicePtr from, std::size_t bytes, StreamHandle handle) {
    BEGIN(cuMemcpyDtoDAsync);
    CURRENT(ordinal);
    STREAM(stream, handle, ordinal);
    return submit(stream, make_work(entry.call, [=](const Access& access) {
                      const void* source = access.host(from, bytes);
                      std::memmove(access.host(to, bytes), source, bytes);
                  }));
}

int cuMemsetD8Async(DevicePtr to, unsigned char value, std::size_t bytes, StreamHandle handle) {
    BEGIN(cuMemsetD8Async);
    CURRENT(ordinal);
    STREAM(stream, handle, ordinal);
    return submit(stream, make_work(entry.call,
                                    [=](const Access& access) { std::memset(access.host(to, bytes), value, bytes); }));
}

int cuPointerGetAttributes(unsigned count, int* attributes, void** values, DevicePtr pointer) {
    BEGIN(cuPointerGetAttributes);
    CURRENT(ordinal);
    AllocationRef found = find_device(pointer);
    if (!found) found = find_pinned(reinterpret_cast<const void*>(pointer));
    if (found && found->freed) found = nullptr;
    for (unsigned i = 0; i < count; ++i) {
        switch (attributes[i]) {
            case 2: *static_cast<unsigned*>(values[i]) = !found ? 0u : found->pinned ? 1u : 2u; break;  // MEMORY_TYPE
            case 8: *static_cast<bool*>(values[i]) = false; break;                                      // IS_MANAGED
            case 9: *static_cast<int*>(values[i]) = found ? found->device : -2; break;  // DEVICE_ORDINAL
            case 11:                                                                    // RANGE_START
                *static_cast<DevicePtr*>(values[i]) = !found ? 0
                                                      : found->address
                                                          ? found->address
                                                          : reinterpret_cast<DevicePtr>(found->storage.get());
                break;
            case 12: *static_cast<std::size_t*>(values[i]) = found ? found->bytes : 0; break;  // RANGE_SIZE
            default:
                return refuse(invalid_value, "cuPointerGetAttributes: the simulated driver does not know attribute " +
                                                 std::to_string(attributes[i]));
        }
    }
    return ok;
}

int cuStreamCreate(StreamHandle* handle, unsigned flags) {
    BEGIN(cuStreamCreate);
    CURRENT(ordinal);
    constexpr unsigned non_blocking = 1;
    if (flags != non_blocking) violation("cuStreamCreate: a stream that waits for the legacy default stream");
    give_handle(make_stream(ordinal), handle);
    return ok;
}

int cuStreamDestroy(StreamHandle handle) {
    BEGIN_ENDING(cuStreamDestroy);
    CURRENT_OR_LOST(ordinal);
    const auto stream = find<Stream>(handle, entry.call);
    if (!stream) return invalid_handle;
    const int wrong = entry.same_device(*stream, Kind::stream, ordinal);
    if (const auto capture = stream->capture) {
        violation("cuStreamDestroy of a stream that captures");
        invalidate(*capture);
        capture->streams.erase(stream.get());
        if (capture->origin == stream.get()) {
            for (Stream* member : capture->streams) member->capture = nullptr;
            auto& running = state().captures;
            for (auto it = running.begin(); it != running.end(); ++it)
                if (*it == capture) {
                    running.erase(it);
                    break;
                }
        }
    }
    stream->stop = true;  // what is queued still runs
    remove_object(*stream);
    state().changed.notify_all();
    return entry.done(ordinal, wrong);
}

// The two named default streams may be waited for: a producer of frames may use them. Nothing of this driver runs
// there.
static bool named_default_stream(StreamHandle handle) {
    const auto value = reinterpret_cast<std::uintptr_t>(handle);
    return value == 1 || value == 2;
}

int cuStreamSynchronize(StreamHandle handle) {
    BEGIN_ENDING(cuStreamSynchronize);
    CURRENT_OR_LOST(ordinal);
    if (named_default_stream(handle)) return unsafe_during_capture() ? int{capture_implicit} : int{ok};
    STREAM(stream, handle, ordinal);
    if (stream->capture) return refuse(invalidate(*stream->capture), "cuStreamSynchronize of a stream that captures");
    SAFE_IN_CAPTURE();
    drain(entry.lock, *stream);
    return entry.done(ordinal);
}

int cuStreamQuery(StreamHandle handle) {
    BEGIN(cuStreamQuery);
    CURRENT(ordinal);
    STREAM(stream, handle, ordinal);
    if (stream->capture) return refuse(invalidate(*stream->capture), "cuStreamQuery of a stream that captures");
    SAFE_IN_CAPTURE();
    return idle(*stream) ? int{ok} : int{not_ready};
}

int cuStreamWaitEvent(StreamHandle stream_handle, EventHandle event_handle, unsigned flags) {
    BEGIN(cuStreamWaitEvent);
    CURRENT(ordinal);
    STREAM(stream, stream_handle, ordinal);
    const auto event = find<Event>(event_handle, entry.call);
    if (!event || flags != 0) return invalid_handle;
    return wait_event(stream, event);  // an event of another device is allowed
}

int cuStreamBeginCapture(StreamHandle handle, int mode) {
    BEGIN(cuStreamBeginCapture);
    CURRENT(ordinal);
    STREAM(stream, handle, ordinal);
    return begin_capture(stream, mode);
}

int cuStreamEndCapture(StreamHandle handle, GraphHandle* graph) {
    BEGIN_ENDING(cuStreamEndCapture);
    CURRENT_OR_LOST(ordinal);
    STREAM(stream, handle, ordinal);
    *graph = nullptr;
    std::shared_ptr<Graph> made;
    const int code = entry.done(ordinal, end_capture(stream, &made));
    if (code == ok) give_handle(made, graph);
    if (code != ok && made) remove_object(*made);
    return code;
}

int cuStreamIsCapturing(StreamHandle handle, int* status) {
    BEGIN(cuStreamIsCapturing);
    CURRENT(ordinal);
    STREAM(stream, handle, ordinal);
    *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    return ok;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
    BEGIN(cuThreadExchangeStreamCaptureMode);
    if (*mode < global || *mode > relaxed) return invalid_value;
    *mode = exchange_capture_mode(*mode);
    return ok;
}

int cuEventCreate(EventHandle* handle, unsigned flags) {
    BEGIN(cuEventCreate);
    CURRENT(ordinal);
    constexpr unsigned disable_timing = 2;
    auto event = std::make_shared<Event>();
    event->timing = (flags & disable_timing) == 0;
    add_object(event, ordinal);
    give_handle(event, handle);
    return ok;
}

int cuEventDestroy(EventHandle handle) {
    BEGIN_ENDING(cuEventDestroy);
    CURRENT_OR_LOST(ordinal);
    const auto event = find<Event>(handle, entry.call);
    if (!event) return invalid_handle;
    remove_object(*event);
    return entry.done(ordinal, entry.same_device(*event, Kind::event, ordinal));
}

int cuEventRecord(EventHandle event_handle, StreamHandle stream_handle) {
    BEGIN(cuEventRecord);
    CURRENT(ordinal);
    const auto event = find<Event>(event_handle, entry.call);
    if (!event) return invalid_handle;
    if (const int refused = entry.same_device(*event, Kind::event, ordinal)) return refused;
    if (named_default_stream(stream_handle)) {
        event->capture = nullptr;
        event->completed = ++event->recorded;
        event->time = std::chrono::steady_clock::now();
        return ok;
    }
    STREAM(stream, stream_handle, ordinal);
    return record_event(stream, event);
}

static int captured(const Entry& entry, const Event& event) {
    if (!event.capture) return ok;
    return refuse(invalidate(*event.capture, captured_event),
                  std::string(entry.call) + " of an event inside a capture");
}

int cuEventQuery(EventHandle handle) {
    BEGIN(cuEventQuery);
    CURRENT(ordinal);
    const auto event = find<Event>(handle, entry.call);
    if (!event) return invalid_handle;
    if (const int refused = captured(entry, *event)) return refused;
    SAFE_IN_CAPTURE();
    return event->completed == event->recorded ? int{ok} : int{not_ready};
}

int cuEventSynchronize(EventHandle handle) {
    BEGIN_ENDING(cuEventSynchronize);
    CURRENT_OR_LOST(ordinal);
    const auto event = find<Event>(handle, entry.call);
    if (!event) return invalid_handle;
    if (const int refused = captured(entry, *event)) return refused;
    SAFE_IN_CAPTURE();
    const long number = event->recorded;
    state().changed.wait(entry.lock, [&] { return event->completed >= number; });
    return entry.done(ordinal);
}

int cuEventElapsedTime(float* milliseconds, EventHandle from_handle, EventHandle to_handle) {
    BEGIN(cuEventElapsedTime);
    CURRENT(ordinal);
    const auto from = find<Event>(from_handle, entry.call);
    const auto to = find<Event>(to_handle, entry.call);
    if (!from || !to || !from->timing || !to->timing || !from->recorded || !to->recorded) return invalid_handle;
    if (from->completed < from->recorded || to->completed < to->recorded) return not_ready;
    *milliseconds = std::chrono::duration<float, std::milli>(to->time - from->time).count();
    return ok;
}

}  // namespace edgeyolo::fake
