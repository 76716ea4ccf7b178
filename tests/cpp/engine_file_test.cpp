#include "engine_file.hpp"
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cstdio>
#include <fstream>
#include <random>
#include "error.hpp"
#include "json_scan.hpp"
#include "sha256.hpp"

namespace edgeyolo {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes bytes_of(const std::string& text) {
    return {text.begin(), text.end()};
}

// The file as Ultralytics writes it, with any number in the length field.
Bytes file_with(std::int64_t length, const std::string& text, const std::string& plan) {
    const auto raw = static_cast<std::uint32_t>(length);
    Bytes bytes;
    for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<std::uint8_t>(raw >> shift));
    bytes.insert(bytes.end(), text.begin(), text.end());
    bytes.insert(bytes.end(), plan.begin(), plan.end());
    return bytes;
}

Bytes file_with(const std::string& text, const std::string& plan) {
    return file_with(static_cast<std::int64_t>(text.size()), text, plan);
}

std::string plan_of(const EngineFile& file) {
    return {file.plan(), file.plan() + file.plan_size()};
}

std::string error_of(const Bytes& bytes) {
    try {
        EngineFile::parse(bytes, "net.engine");
    } catch (const EngineError& error) {
        return error.what();
    }
    return "no error";
}

const std::string json = R"({"task": "detect", "names": {"0": "a\u00e9"}, "edgeyolo": {"dla": null}})";
const std::string plan = "ptrt-the-plan";

TEST(EngineFile, HeaderAndPlan) {
    const EngineFile file = EngineFile::parse(file_with(json, plan), "net.engine");
    EXPECT_EQ(file.header(), json);
    EXPECT_EQ(plan_of(file), plan);
    EXPECT_EQ(file.path(), "net.engine");
}

TEST(EngineFile, MovedFileKeepsItsBytes) {
    EngineFile file = EngineFile::parse(file_with(json, plan), "net.engine");
    const EngineFile moved = std::move(file);
    EXPECT_EQ(moved.header(), json);
    EXPECT_EQ(plan_of(moved), plan);
}

TEST(EngineFile, LengthCountsBytesNotCharacters) {
    const std::string text = "{\"name\": \"caf\xC3\xA9\"}";
    const EngineFile file = EngineFile::parse(file_with(text, plan), "net.engine");
    EXPECT_EQ(file.header(), text);
    EXPECT_EQ(plan_of(file), plan);
}

TEST(EngineFile, DigestIsThePlansAlone) {
    const EngineFile with = EngineFile::parse(file_with(json, "abc"), "net.engine");
    EXPECT_EQ(with.plan_digest(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    const EngineFile other = EngineFile::parse(file_with("{}", "abc"), "net.engine");
    EXPECT_EQ(other.plan_digest(), with.plan_digest());
}

TEST(EngineFile, BarePlan) {
    // "ptrt" and "ftrt" read as a length are beyond every file of ours; 0 and negative numbers are no length either.
    const Bytes bare[] = {bytes_of(plan),
                          bytes_of("ftrt and much more"),
                          file_with(0, "plan", ""),
                          file_with(-1, "plan", ""),
                          file_with(-2147483648LL, "plan", ""),
                          file_with(2147483647LL, "plan", ""),
                          file_with(3, "not json at all", plan)};
    for (const Bytes& bytes : bare) {
        const EngineFile file = EngineFile::parse(bytes, "net.engine");
        EXPECT_TRUE(file.header().empty());
        EXPECT_EQ(plan_of(file), std::string(bytes.begin(), bytes.end()));
    }
}

TEST(EngineFile, TooShort) {
    for (std::size_t size = 0; size <= 4; ++size) {
        Bytes bytes = file_with(json, plan);
        bytes.resize(size);
        EXPECT_NE(error_of(bytes).find("found " + std::to_string(size) + " bytes"), std::string::npos)
            << error_of(bytes);
    }
}

TEST(EngineFile, EveryTruncation) {
    const Bytes whole = file_with(json, plan);
    for (std::size_t size = 0; size < whole.size(); ++size) {
        const Bytes cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
        const std::size_t header_end = 4 + json.size();
        if (size <= header_end) {
            EXPECT_NE(error_of(cut), "no error") << size;
            EXPECT_NE(error_of(cut).find("net.engine"), std::string::npos);
        } else {
            EXPECT_EQ(plan_of(EngineFile::parse(cut, "net.engine")), plan.substr(0, size - header_end));
        }
    }
}

TEST(EngineFile, DamagedLength) {
    for (const std::int64_t length :
         {std::int64_t{0}, std::int64_t{-1}, std::int64_t{-2147483648LL}, std::int64_t{2147483647},
          static_cast<std::int64_t>(json.size() + plan.size() + 1)}) {
        const std::string message = error_of(file_with(length, json, plan));
        EXPECT_NE(message.find("claims " + std::to_string(length) + " bytes"), std::string::npos) << message;
    }
    // A wrong length inside the file cuts the object or adds to it.
    for (const std::size_t length : {std::size_t{1}, json.size() - 1, json.size() + 1, json.size() + plan.size()}) {
        const std::string message = error_of(file_with(static_cast<std::int64_t>(length), json, plan));
        EXPECT_NE(message.find("no valid JSON"), std::string::npos) << message;
    }
}

TEST(EngineFile, JsonThatIsNoObject) {
    for (const char* text : {"[1, 2]", "[]", "7", "\"text\"", "null", "true", " [ {} ] "}) {
        const std::string message = error_of(file_with(text, plan));
        EXPECT_NE(message.find("another kind of JSON"), std::string::npos) << text << ": " << message;
    }
}

TEST(EngineFile, HeaderWithoutPlan) {
    EXPECT_NE(error_of(file_with(json, "")).find("holds no plan"), std::string::npos);
}

TEST(EngineFile, RandomBytesNeverCrash) {
    std::mt19937 random(7);
    int headers = 0;
    for (int round = 0; round < 20000; ++round) {
        Bytes bytes = round % 2 ? file_with(json, plan) : Bytes(random() % 64);
        if (round % 2) {
            for (std::size_t flips = 1 + random() % 3; flips > 0; --flips) {
                const std::size_t at = random() % bytes.size();
                bytes[at] = static_cast<std::uint8_t>(random());
            }
        } else {
            for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
        }
        try {
            const EngineFile file = EngineFile::parse(bytes, "net.engine");
            ASSERT_GT(file.plan_size(), 0u);
            ASSERT_EQ(file.header().empty() ? file.plan_size() : 4 + file.header().size() + file.plan_size(),
                      bytes.size());
            headers += !file.header().empty();
        } catch (const EngineError&) {
        }
    }
    EXPECT_GT(headers, 1000);  // flips in the plan and in strings leave a good file
}

class EngineFileOnDisk : public ::testing::Test {
protected:
    void SetUp() override {
        char name[] = "/tmp/engine_file_XXXXXX";
        ASSERT_NE(mkdtemp(name), nullptr);
        folder_ = name;
    }
    void TearDown() override {
        std::remove((folder_ + "/net.engine").c_str());
        rmdir(folder_.c_str());
    }
    static std::string error_of_path(const std::string& path) {
        try {
            EngineFile::read(path);
        } catch (const EngineError& error) {
            return error.what();
        }
        return "no error";
    }
    std::string folder_;
};

TEST_F(EngineFileOnDisk, Read) {
    const std::string path = folder_ + "/net.engine";
    const Bytes bytes = file_with(json, plan);
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    const EngineFile file = EngineFile::read(path);
    EXPECT_EQ(file.header(), json);
    EXPECT_EQ(plan_of(file), plan);
}

TEST_F(EngineFileOnDisk, WhatIsNoFile) {
    EXPECT_NE(error_of_path(folder_ + "/net.engine").find("No such file"), std::string::npos);
    EXPECT_NE(error_of_path(folder_).find("expected a file"), std::string::npos);
    EXPECT_NE(error_of_path("/dev/zero").find("expected a file"), std::string::npos);
    std::ofstream(folder_ + "/net.engine").close();
    EXPECT_NE(error_of_path(folder_ + "/net.engine").find("found 0 bytes"), std::string::npos);
}

TEST(JsonScan, Valid) {
    for (const char* text :
         {"{}", " {\"a\":1}\n", R"({"a":[1,-2.5e+3,0.1E-2,0],"b":{"c":null},"d":true,"e":false})",
          R"({"\u00e9\n\"\\\/":"\ud83d\ude00"})", "{\"a\":\"\xF0\x9F\x98\x80\xED\x9F\xBF\xEE\x80\x80\"}"})
        EXPECT_EQ(scan_json(text).kind, JsonKind::object) << text;
    EXPECT_EQ(scan_json("-0").kind, JsonKind::other);
}

TEST(JsonScan, Invalid) {
    for (const char* text :
         {"", " ", "{", "}", "{]", "{\"a\"}", "{\"a\":}", "{\"a\":1,}", "{,}", "{a:1}", "{'a':1}", "{\"a\":01}",
          "{\"a\":1.}", "{\"a\":.5}", "{\"a\":+1}", "{\"a\":1e}", "{\"a\":NaN}", "{\"a\":Infinity}", "{\"a\":\"\n\"}",
          "{\"a\":\"\\x\"}", "{\"a\":\"\\u12g4\"}", "{\"a\":\"\\u12", "{\"a\":\"", "{} {}", "[1 2]", "tru", "nul", "-",
          "/**/{}", "\xEF\xBB\xBF{}",
          // Not UTF-8: alone, cut, overlong, surrogate, beyond Unicode.
          "\"\x80\"", "\"\xC3\"", "\"\xC0\xAF\"", "\"\xE0\x80\xAF\"", "\"\xED\xA0\x80\"", "\"\xF4\x90\x80\x80\"",
          "\"\xF5\x80\x80\x80\"", "\"\xE2\x82\""})
        EXPECT_EQ(scan_json(text).kind, JsonKind::invalid) << text;
    EXPECT_EQ(scan_json(R"({"a": 1, b: 2})").error_at, 9u);
    EXPECT_EQ(scan_json(std::string_view("{\"a\":\"\0\"}", 9)).kind, JsonKind::invalid);
}

TEST(JsonScan, Depth) {
    const auto nested = [](std::size_t levels) { return std::string(levels, '[') + std::string(levels, ']'); };
    EXPECT_EQ(scan_json(nested(64)).kind, JsonKind::other);
    EXPECT_EQ(scan_json(nested(65)).kind, JsonKind::invalid);
    EXPECT_EQ(scan_json(std::string(1 << 20, '[')).kind, JsonKind::invalid);
}

// Known answers of FIPS 180-4 and NIST's CAVP.
TEST(Sha256, KnownAnswers) {
    const auto digest = [](const std::string& text) {
        return sha256(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
    };
    EXPECT_EQ(digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(digest(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    // Around the end of a block, where the padding takes one block or two.
    EXPECT_EQ(digest(std::string(55, 'a')), "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
    EXPECT_EQ(digest(std::string(56, 'a')), "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
    EXPECT_EQ(digest(std::string(64, 'a')), "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
}

}  // namespace
}  // namespace edgeyolo
