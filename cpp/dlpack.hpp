// The memory layout of DLPack, the standard by which array libraries hand memory to each other: the parts of
// https://dmlc.github.io/dlpack that we exchange. A capsule "dltensor" holds a ManagedTensor, "dltensor_versioned" a
// ManagedTensorVersioned; whoever takes one renames the capsule to "used_..." and calls the deleter when done.
#pragma once
#include <cstdint>

namespace edgeyolo::dlpack {

enum DeviceType : std::int32_t {
    cpu = 1,
    cuda = 2,
    cuda_host = 3,
    cuda_managed = 13
};

enum TypeCode : std::uint8_t {
    signed_integer = 0,
    unsigned_integer = 1,
    floating = 2
};

struct Device {
    std::int32_t type;
    std::int32_t id;
};

struct DataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;  // 1: scalars
};

struct Tensor {
    void* data;
    Device device;
    std::int32_t ndim;
    DataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;  // in elements; nullptr: row-major without gaps
    std::uint64_t byte_offset;
};

struct ManagedTensor {
    Tensor tensor;
    void* context;
    void (*deleter)(ManagedTensor*);
};

struct Version {
    std::uint32_t major;
    std::uint32_t minor;
};

struct ManagedTensorVersioned {
    Version version;
    void* context;
    void (*deleter)(ManagedTensorVersioned*);
    std::uint64_t flags;  // bit 0: read only
    Tensor tensor;
};

// Functions that a library offers to C beside __dlpack__ (DLPack 1.2; torch since 2.10): no call into Python per frame.
// The type's attribute "__dlpack_c_exchange_api__" is a capsule "dlpack_exchange_api" of one. All return 0, or set a
// Python error. Only the members that we use are named; their order is the standard's.
struct ExchangeApi {
    Version version;
    ExchangeApi* before;  // of an older major version, or null
    void* allocate;
    int (*from_object_no_sync)(void* object, ManagedTensorVersioned** tensor);
    void* to_object_no_sync;
    void* tensor_from_object_no_sync;
    // The stream that the calling thread's work of this library goes to; null is the legacy default stream.
    int (*current_work_stream)(DeviceType type, std::int32_t id, void** stream);
};
constexpr const char* exchange_attribute = "__dlpack_c_exchange_api__";
constexpr const char* exchange_name = "dlpack_exchange_api";

constexpr Version our_version{1, 0};
constexpr const char* legacy_name = "dltensor";
constexpr const char* legacy_used = "used_dltensor";
constexpr const char* versioned_name = "dltensor_versioned";
constexpr const char* versioned_used = "used_dltensor_versioned";

}  // namespace edgeyolo::dlpack
