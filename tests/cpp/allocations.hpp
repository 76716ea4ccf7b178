// Counts calls of operator new, to prove that a frame after the first allocates nothing.
#pragma once

namespace edgeyolo_test {

// Allocations made by this thread since it began.
long allocations();

}  // namespace edgeyolo_test
