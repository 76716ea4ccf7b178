// The errors of the core. Native code throws one of these and nothing else; it never ends the process.
// A message says what was expected, what was found and what to do.
#pragma once
#include <stdexcept>
#include <string>

namespace edgeyolo {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// The caller handed in something that cannot be used (an image, a threshold, a shape).
struct InvalidInput : Error {
    using Error::Error;
};
// The model file or the library that runs it cannot be used.
struct EngineError : Error {
    using Error::Error;
};
// The device or its driver is missing, lost, or out of memory.
struct DeviceError : Error {
    using Error::Error;
};

template <class E = InvalidInput>
inline void check(bool ok, const std::string& message) {
    if (!ok) throw E(message);
}
// Literal messages cost nothing while the condition holds.
template <class E = InvalidInput>
inline void check(bool ok, const char* message) {
    if (!ok) throw E(message);
}

}  // namespace edgeyolo
