// Which library the loader takes, and what it says of those that it refuses. NVIDIA's own lean libraries join when
// EDGEYOLO_TEST_LEAN_10 and EDGEYOLO_TEST_LEAN_11 name their files; they are in the wheels
// tensorrt-lean-cu13-libs==10.16.1.11 and ==11.4.0.106 (pip download --no-deps, then unzip).
#include <unistd.h>
#include <cstdio>
#include "trt_test.hpp"

namespace edgeyolo {
namespace {

TEST(Version, Numbers) {
    EXPECT_EQ(trt::version_text(101601), "10.16.1");
    EXPECT_EQ(trt::version_text(110400), "11.4.0");
    EXPECT_EQ(trt::version_text(8601), "8.6.1");
    EXPECT_EQ(trt::version_text(10701), "1.7.1");
    EXPECT_EQ(trt::major_of(101601), 10);
    EXPECT_EQ(trt::major_of(8601), 8);
    EXPECT_EQ(shape_text({1, -1}), "(1, -1)");
    EXPECT_EQ(shape_text({300}), "(300,)");
}

class Loader : public test::Gpu {
protected:
    void SetUp() override {
        test::Gpu::SetUp();
        unsetenv("EDGEYOLO_TENSORRT_LIBRARY");
        char name[] = "/tmp/loader_XXXXXX";
        ASSERT_NE(mkdtemp(name), nullptr);
        folder_ = name;
    }
    void TearDown() override {
        unsetenv("EDGEYOLO_FAKE_TENSORRT_VERSION");
        unsetenv("EDGEYOLO_TENSORRT_LIBRARY");
        for (const std::string& link : links_) unlink(link.c_str());
        rmdir(folder_.c_str());
        test::Gpu::TearDown();
    }
    void link(const std::string& target, const std::string& name) {
        links_.push_back(folder_ + "/" + name);
        ASSERT_EQ(symlink(target.c_str(), links_.back().c_str()), 0);
    }
    static std::string error_of(const trt::Options& wanted) {
        return message_of<EngineError>([&] { trt::find_library(wanted); });
    }
    std::string folder_;
    std::vector<std::string> links_;
};

TEST_F(Loader, NamedLibrary) {
    const trt::Library library = trt::find_library(options());
    EXPECT_EQ(trt::major_of(library.version), test_major);
    EXPECT_EQ(library.path, test_library);
    EXPECT_HAS(library.text(), "TensorRT " + std::to_string(test_major) + ".");

    trt::Options by_variable = options();
    by_variable.library.clear();
    setenv("EDGEYOLO_TENSORRT_LIBRARY", test_library.c_str(), 1);
    EXPECT_EQ(trt::find_library(by_variable).path, test_library);
    setenv("EDGEYOLO_TENSORRT_LIBRARY", "/nowhere/libnvinfer.so.10", 1);
    EXPECT_HAS(error_of(by_variable), "/nowhere/libnvinfer.so.10");
}

TEST_F(Loader, FoldersAreSearched) {
    trt::Options wanted = options();
    wanted.library.clear();
    wanted.folders = {"/nowhere", folder_};
    const std::string none = error_of(wanted);
    if (none == "no error") GTEST_SKIP() << "this machine has a TensorRT of its own";
    EXPECT_HAS(none, "EDGEYOLO_TENSORRT_LIBRARY");
    link(test_library, "libnvinfer_lean.so." + std::to_string(test_major));
    EXPECT_EQ(trt::major_of(trt::find_library(wanted).version), test_major);
    wanted.major = 12;
    EXPECT_HAS(error_of(wanted), "TensorRT 12 was asked for");
}

TEST_F(Loader, OtherVersions) {
    struct Case {
        const char* version;
        const char* part;
    };
    for (const Case& wanted : {Case{"8601", "TensorRT 8.6.1"}, Case{"100001", "10.1 or newer is needed"},
                               Case{"10701", "TensorRT-RTX"}, Case{"120300", "TensorRT 12.3.0"}}) {
        setenv("EDGEYOLO_FAKE_TENSORRT_VERSION", wanted.version, 1);
        const std::string message = error_of(options());
        EXPECT_HAS(message, wanted.part);
        EXPECT_HAS(message, test_library);
    }
    EXPECT_HAS(error_of(options()), "EDGEYOLO_TENSORRT_ROOT");  // how to rebuild
    EXPECT_HAS(error_of(options()), "built for TensorRT");      // what there is
}

TEST_F(Loader, WhatIsNoTensorRT) {
    trt::Options wanted = options();
    wanted.library = "libpthread.so.0";
    EXPECT_HAS(error_of(wanted), "no getInferLibVersion");
    wanted.library = "/dev/null";
    EXPECT_HAS(error_of(wanted), "cannot use the TensorRT library '/dev/null'");
    wanted.library = test_library;
    wanted.adapter_folder = folder_;
    EXPECT_HAS(error_of(wanted), "built for no TensorRT version");
}

TEST_F(Loader, WhatIsNoAdapter) {
    const cuda::DeviceRef device = cuda::Device::open(0);
    const cuda::ContextGuard guard(*device);
    trt::Options wanted = options();
    wanted.adapter_folder = folder_;
    link(test_library, "_trt" + std::to_string(test_major) + ".so");
    EXPECT_HAS(message_of<EngineError>([&] { trt::load_engine("plan", 4, wanted); }), "is no adapter of edgeyolo");
    unlink(links_.back().c_str());
    wanted.adapter_folder += "/.";  // the loader knows a path that it has opened
    link("/dev/null", "_trt" + std::to_string(test_major) + ".so");
    EXPECT_HAS(message_of<EngineError>([&] { trt::load_engine("plan", 4, wanted); }), "cannot open edgeyolo's adapter");
}

TEST_F(Loader, MissingPluginsAreTold) {
    const cuda::DeviceRef device = cuda::Device::open(0);
    const cuda::ContextGuard guard(*device);
    trt::Options wanted = options();
    wanted.plugins = true;
    EXPECT_HAS(message_of<EngineError>([&] { trt::load_engine("plan", 4, wanted); }), "libnvinfer_plugin.so");
}

// In a process of its own: the driver is opened once.
TEST(NoDriverDeathTest, IsADeviceError) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(
        {
            setenv("EDGEYOLO_CUDA_DRIVER", "/nowhere/libcuda.so.1", 1);
            const std::string message = message_of<DeviceError>([] { trt::load_engine("plan", 4, options()); });
            std::fputs(message.c_str(), stderr);
            std::_Exit(message.find("another error") == std::string::npos ? 0 : 1);
        },
        ::testing::ExitedWithCode(0), "/nowhere/libcuda.so.1");
}

// NVIDIA's own lean libraries.
class Lean : public test::Gpu, public ::testing::WithParamInterface<int> {
protected:
    void SetUp() override {
        test::Gpu::SetUp();
        const char* path = std::getenv(("EDGEYOLO_TEST_LEAN_" + std::to_string(GetParam())).c_str());
        if (!path) GTEST_SKIP() << "EDGEYOLO_TEST_LEAN_" << GetParam() << " names no library";
        options_ = options();
        options_.library = path;
    }
    bool has_adapter() const {
        return access((adapter_folder + "/_trt" + std::to_string(GetParam()) + ".so").c_str(), F_OK) == 0;
    }
    trt::Options options_;
};

TEST_P(Lean, VersionIsDetected) {
    const std::string number = GetParam() == 10 ? "10.16.1" : "11.4.0";
    if (has_adapter()) {
        const trt::Library library = trt::find_library(options_);
        EXPECT_HAS(library.text(), "TensorRT " + number + " lean (");
        EXPECT_TRUE(library.lean);
    } else {
        const std::string message = message_of<EngineError>([&] { trt::find_library(options_); });
        EXPECT_HAS(message, "built for TensorRT " + std::to_string(test_major) + ", found TensorRT " + number +
                                " lean (" + options_.library);
    }
    trt::Options other = options_;
    other.major = 9;
    EXPECT_HAS(message_of<EngineError>([&] { trt::find_library(other); }),
               "TensorRT 9 was asked for, found TensorRT " + number);
}

TEST_P(Lean, FolderOfTheWheelIsSearched) {
    if (!has_adapter()) GTEST_SKIP() << "no adapter for this major";
    options_.folders = {options_.library.substr(0, options_.library.find_last_of('/'))};
    options_.library.clear();
    options_.major = GetParam();  // the other one is in this process already
    EXPECT_EQ(trt::major_of(trt::find_library(options_).version), GetParam());
}

// The core's driver answers, so that the library is started: on the simulated driver it finds no GPU of its own and
// hands out a pointer that is none; on a real one it refuses the plan.
TEST_P(Lean, BadPlanIsAnEngineError) {
    const cuda::DeviceRef device = cuda::Device::open(0);
    const cuda::ContextGuard guard(*device);
    const std::string message = message_of<EngineError>([&] { trt::load_engine("not a plan", 10, options_); });
    EXPECT_EQ(message.find("another error"), std::string::npos) << message;
    if (has_adapter()) {
        EXPECT_HAS(message, "TensorRT says: ");
    }
}

INSTANTIATE_TEST_SUITE_P(Wheels, Lean, ::testing::Values(10, 11));

}  // namespace
}  // namespace edgeyolo
