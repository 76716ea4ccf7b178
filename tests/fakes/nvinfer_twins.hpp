#pragma once
#include <string>

namespace edgeyolo::toy {

// Tells the simulated driver what the test TensorRT's kernels do. Does nothing with a real driver.
void register_twins(const std::string& driver_library);

}  // namespace edgeyolo::toy
