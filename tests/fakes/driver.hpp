// Control of the simulated CUDA driver (libedgeyolo_fake_cuda.so): set-up, faults and observation, for tests.
// Tests open the library by its path (C++: tests/cpp/simulated_gpu.hpp, Python: ctypes), as the core does through
// EDGEYOLO_CUDA_DRIVER; nothing links it, so that it never stands between a program and a real driver.
//
// The same can be set by environment variables before the library is opened:
//   EDGEYOLO_FAKE_DEVICES=2  EDGEYOLO_FAKE_INTEGRATED=0  EDGEYOLO_FAKE_MEMORY_MB=1024
//   EDGEYOLO_FAKE_SEED=1     EDGEYOLO_FAKE_DELAY_US=50
//   EDGEYOLO_FAKE_FAULTS=cuMemAlloc:3:2:once,cuGraphLaunch:1:719:lost   (call : nth : CUresult : once|always|lost)
//   EDGEYOLO_FAKE_SPOIL=1:once   EDGEYOLO_FAKE_EMPTY=1:always   EDGEYOLO_FAKE_STALE=1:always   (nth : once|always)
#pragma once

#pragma GCC visibility push(default)
extern "C" {

// Back to the state after loading, environment included. Waits for all streams. Returns the number of handles and
// allocations that were still alive; devices opened before must be gone.
long edgeyolo_fake_reset(void);

// Takes effect for contexts made afterwards. integrated: the GPU shares its memory with the CPU.
void edgeyolo_fake_set_devices(int count, int integrated, unsigned long long bytes_each);
// Streams pause at random between operations, up to delay_us; the same seed gives the same pauses.
void edgeyolo_fake_set_delay(unsigned seed, unsigned delay_us);

enum {
    edgeyolo_fake_once = 0,
    edgeyolo_fake_always = 1,
    edgeyolo_fake_lost = 2
};
// The nth call of `call` from now on (1 is the next) returns `code`: once; from then on always; or with the device
// lost, so that every later call on it returns the code too. A faulted call does nothing, except that calls that
// destroy, end or wait for something do it and return the code, as the real driver does when it passes on an earlier
// error.
void edgeyolo_fake_fault(const char* call, long nth, int code, int mode);
// The nth capture from now on is invalidated while it records, as a synchronise in another thread would do it.
void edgeyolo_fake_spoil_capture(long nth, int mode);
// The nth capture from now on ends well, in a graph without nodes.
void edgeyolo_fake_empty_graph(long nth, int mode);
// The graph of the nth capture from now on runs nothing when it is launched.
void edgeyolo_fake_stale_graph(long nth, int mode);
void edgeyolo_fake_lose_device(int ordinal, int code);
void edgeyolo_fake_clear_faults(void);

// Calls of a driver function since loading or reset, refused ones included; of all functions for a null name.
long edgeyolo_fake_calls(const char* call);
// Faults that were delivered since loading or reset.
long edgeyolo_fake_faults_hit(void);
// kind: "context" "stream" "event" "module" "graph" "exec" "device_memory" "pinned_memory"; null is all of them.
long edgeyolo_fake_live(const char* kind);
unsigned long long edgeyolo_fake_memory(int ordinal);       // bytes in use
unsigned long long edgeyolo_fake_peak_memory(int ordinal);  // most bytes that were in use since loading or reset
// Operations that streams of this device have run.
long edgeyolo_fake_operations(int ordinal);
// What the program did that no correct program does: count, and the texts, one a line. Returns the length of the text;
// at most size - 1 bytes are written.
long edgeyolo_fake_violations(void);
long edgeyolo_fake_violation_text(char* text, long size);
void edgeyolo_fake_clear_violations(void);
}
#pragma GCC visibility pop
