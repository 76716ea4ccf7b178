// The simulated CUDA driver: modules, kernels, graphs.
#include <algorithm>

#include "driver_entry.hpp"

namespace edgeyolo::fake {

int cuModuleLoadData(ModuleHandle* handle, const void* image) {
    BEGIN(cuModuleLoadData);
    CURRENT(ordinal);
    SAFE_IN_CAPTURE();
    auto module = std::make_shared<Module>();
    const auto* text = static_cast<const char*>(image);
    constexpr std::uint32_t fatbin_magic = 0xba55ed50;
    std::uint32_t magic = 0;
    std::memcpy(&magic, image, sizeof magic);
    if (std::strncmp(text, image_magic, std::strlen(image_magic)) == 0) {
        text += std::strlen(image_magic);
        while (*text) {
            const std::size_t length = std::strcspn(text, "\n");
            if (length) module->names.emplace(text, length);
            text += length + (text[length] == '\n');
        }
    } else if (magic != fatbin_magic) {
        return invalid_image;
    }
    add_object(module, ordinal);
    give_handle(module, handle);
    return ok;
}

int cuModuleUnload(ModuleHandle handle) {
    BEGIN_ENDING(cuModuleUnload);
    CURRENT_OR_LOST(ordinal);
    SAFE_IN_CAPTURE();
    const auto module = find<Module>(handle, entry.call);
    if (!module) return invalid_handle;
    const int wrong = entry.same_device(*module, Kind::module, ordinal);
    module->unloaded = true;
    auto& objects = state().objects;
    for (auto it = objects.begin(); it != objects.end();) {
        const auto* function = dynamic_cast<Function*>(it->second.get());
        it = function && function->module == module ? objects.erase(it) : std::next(it);
    }
    remove_object(*module);
    return entry.done(ordinal, wrong);
}

int cuModuleGetFunction(FunctionHandle* handle, ModuleHandle module_handle, const char* name) {
    BEGIN(cuModuleGetFunction);
    CURRENT(ordinal);
    const auto module = find<Module>(module_handle, entry.call);
    if (!module) return invalid_handle;
    if (const int refused = entry.same_device(*module, Kind::module, ordinal)) return refused;
    if (!module->names.empty() && !module->names.count(name)) return not_found;
    const auto twin = twins().find(name);
    if (twin == twins().end()) return not_found;
    auto function = std::make_shared<Function>();
    function->name = name;
    function->twin = twin->second;
    function->module = module;
    add_object(function, ordinal);
    give_handle(function, handle);
    return ok;
}

int cuLaunchKernel(FunctionHandle function_handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, StreamHandle stream_handle, void** params,
                   void** extra) {
    BEGIN(cuLaunchKernel);
    CURRENT(ordinal);
    STREAM(stream, stream_handle, ordinal);
    const auto function = find<Function>(function_handle, entry.call);
    if (!function) return invalid_handle;
    if (const int refused = entry.same_device(*function, Kind::function, ordinal)) return refused;
    if (extra) return invalid_value;
    if (!grid_x || !grid_y || !grid_z || grid_y > 65535 || grid_z > 65535 || !block_x || !block_y || !block_z ||
        block_x > 1024 || block_y > 1024 || block_z > 64 || block_x * block_y * block_z > 1024 || shared > 48 * 1024)
        return refuse(invalid_value, "cuLaunchKernel of " + function->name + ": a launch shape that no GPU takes");
    std::vector<std::vector<std::uint8_t>> values;  // copied now
    for (std::size_t i = 0; i < function->twin.param_sizes.size(); ++i) {
        const auto* value = static_cast<const std::uint8_t*>(params[i]);
        values.emplace_back(value, value + function->twin.param_sizes[i]);
    }
    const Dim grid{grid_x, grid_y, grid_z};
    const Dim block{block_x, block_y, block_z};
    return submit(stream, make_work("kernel " + function->name, [=](const Access& access) {
                      auto copies = values;
                      std::vector<void*> pointers;
                      for (auto& value : copies) pointers.push_back(value.data());
                      {
                          const Lock lock(state().mutex);
                          if (function->module->unloaded) {
                              violation("kernel " + function->name + " runs after its module was unloaded");
                              throw IllegalAddress{};
                          }
                      }
                      function->twin.twin(grid, block, shared, pointers.data(), access);
                  }));
}

int cuGraphGetNodes(GraphHandle handle, GraphNodeHandle* nodes, std::size_t* count) {
    BEGIN(cuGraphGetNodes);
    CURRENT(ordinal);
    const auto graph = find<Graph>(handle, entry.call);
    if (!graph) return invalid_handle;
    if (const int refused = entry.same_device(*graph, Kind::graph, ordinal)) return refused;
    if (nodes) return refuse(invalid_value, "cuGraphGetNodes: the simulated driver only counts nodes");
    *count = graph->work.size();
    return ok;
}

int cuGraphDestroy(GraphHandle handle) {
    BEGIN_ENDING(cuGraphDestroy);
    CURRENT_OR_LOST(ordinal);
    const auto graph = find<Graph>(handle, entry.call);
    if (!graph) return invalid_handle;
    remove_object(*graph);
    return entry.done(ordinal, entry.same_device(*graph, Kind::graph, ordinal));
}

constexpr std::size_t exec_bytes = 64 * 1024;  // what an instantiated graph takes of the device

int cuGraphInstantiateWithFlags(GraphExecHandle* handle, GraphHandle graph_handle, unsigned long long flags) {
    BEGIN(cuGraphInstantiateWithFlags);
    CURRENT(ordinal);
    SAFE_IN_CAPTURE();
    const auto graph = find<Graph>(graph_handle, entry.call);
    if (!graph) return invalid_handle;
    if (flags != 0) return invalid_value;
    if (const int refused = entry.same_device(*graph, Kind::graph, ordinal)) return refused;
    Device& d = device(ordinal);
    if (d.used + exec_bytes > d.total) return out_of_memory;
    d.used += exec_bytes;
    d.peak = std::max(d.peak, d.used);
    auto exec = std::make_shared<Exec>();
    exec->work = graph->work;
    exec->stale = graph->stale;
    add_object(exec, ordinal);
    give_handle(exec, handle);
    return ok;
}

static int find_exec(const Entry& entry, GraphExecHandle handle, int ordinal, std::shared_ptr<Exec>& exec) {
    exec = find<Exec>(handle, entry.call);
    return exec ? entry.same_device(*exec, Kind::exec, ordinal) : int{invalid_handle};
}

int cuGraphUpload(GraphExecHandle exec_handle, StreamHandle stream_handle) {
    BEGIN(cuGraphUpload);
    CURRENT(ordinal);
    STREAM(stream, stream_handle, ordinal);
    std::shared_ptr<Exec> exec;
    if (const int refused = find_exec(entry, exec_handle, ordinal, exec)) return refused;
    return stream->capture ? refuse(invalidate(*stream->capture), "cuGraphUpload into a stream that captures")
                           : int{ok};
}

int cuGraphLaunch(GraphExecHandle exec_handle, StreamHandle stream_handle) {
    BEGIN(cuGraphLaunch);
    CURRENT(ordinal);
    STREAM(stream, stream_handle, ordinal);
    std::shared_ptr<Exec> exec;
    if (const int refused = find_exec(entry, exec_handle, ordinal, exec)) return refused;
    if (stream->capture) return refuse(invalidate(*stream->capture), "cuGraphLaunch into a stream that captures");
    enqueue(stream, {nullptr, [ordinal, exec] {
                         const std::lock_guard<std::mutex> one_at_a_time(exec->running);
                         if (exec->stale) return;
                         for (const auto& step : exec->work) run_work(ordinal, *step);
                     }});
    return ok;
}

int cuGraphExecDestroy(GraphExecHandle handle) {
    BEGIN_ENDING(cuGraphExecDestroy);
    CURRENT_OR_LOST(ordinal);
    const auto exec = find<Exec>(handle, entry.call);
    if (!exec) return invalid_handle;
    device(exec->device).used -= exec_bytes;
    remove_object(*exec);  // a launch in flight keeps what it needs
    return entry.done(ordinal, entry.same_device(*exec, Kind::exec, ordinal));
}

}  // namespace edgeyolo::fake
