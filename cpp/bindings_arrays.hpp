// Arrays in GPU memory, in and out of Python: DLPack and __cuda_array_interface__ version 3.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>
#include "cuda.hpp"
#include "dlpack.hpp"
#include "frame.hpp"
#include "pool.hpp"

namespace edgeyolo {

// Takes images that other libraries hold on one GPU. Such a library names its stream (DLPack's C functions, the CUDA
// array interface), or is told a stream of ours and makes it wait for the work that writes the image (DLPack's Python
// method); the pipeline then waits for that stream. Thread-safe.
class FrameIntake {
public:
    explicit FrameIntake(cuda::DeviceRef device) : device_(std::move(device)) {}

    struct Lane {
        cuda::Stream stream;  // empty until it is needed
    };
    struct Taken {
        DeviceImage image;
        Pool<Lane>::Lease lane;  // held until the image has been submitted
    };
    // Throws InvalidInput for what is no uint8 image (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) of this GPU.
    Taken take(const pybind11::object& object, const std::string& color);

private:
    void check_device(int type, int id) const;
    void take_exchanged(const dlpack::ExchangeApi& api, const pybind11::object& object, const std::string& color,
                        Taken& taken);
    void take_dlpack(const pybind11::object& object, const std::string& color, Taken& taken);
    void take_cuda_array(const pybind11::object& object, const std::string& color, Taken& taken);

    const cuda::DeviceRef device_;
    Pool<Lane> lanes_;
};

// Images as Python hands them in, ready for the pipeline.
struct TakenFrames {
    std::vector<Frame> frames;
    std::vector<Size> sizes;
    std::vector<FrameIntake::Taken> lanes;  // dies after the frames were submitted: until then the lanes are theirs
};
// `intake` is empty once the detector was closed. Throws InvalidInput.
TakenFrames take_frames(const std::vector<pybind11::object>& images, const std::string& color,
                        const std::shared_ptr<FrameIntake>& intake);
// A zeroed array over a frame buffer, which is its base: so that a view of a view leads back to it.
pybind11::array as_array(const std::shared_ptr<FrameBuffer>& buffer);

// A row-major array in GPU memory that is complete: nobody writes it any more.
struct DeviceArray {
    std::shared_ptr<const void> owner;  // of the memory
    cuda::DeviceRef device;
    cuda::DevicePtr pointer = 0;
    std::vector<std::int64_t> shape;
    dlpack::DataType dtype{};

    std::size_t bytes() const;
};

void bind_arrays(pybind11::module_& m);

}  // namespace edgeyolo
