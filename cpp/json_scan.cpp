#include "json_scan.hpp"
#include <cstdint>

namespace edgeyolo {
namespace {

constexpr int max_depth = 64;  // recursion stays far from the end of any thread's stack

class Scanner {
public:
    explicit Scanner(std::string_view text) : text_(text) {}

    JsonScan run() {
        space();
        const bool object = peek() == '{';
        if (!value(0)) return {JsonKind::invalid, at_};
        space();
        if (at_ != text_.size()) return {JsonKind::invalid, at_};
        return {object ? JsonKind::object : JsonKind::other, 0};
    }

private:
    // -1 at the end.
    int peek() const { return at_ < text_.size() ? static_cast<unsigned char>(text_[at_]) : -1; }
    bool take(char c) {
        if (peek() != c) return false;
        ++at_;
        return true;
    }
    void space() {
        while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
    }
    bool word(std::string_view expected) {
        if (text_.substr(at_, expected.size()) != expected) return false;
        at_ += expected.size();
        return true;
    }

    bool value(int depth) {
        switch (peek()) {
            case '{': return depth < max_depth && members('{', '}', depth);
            case '[': return depth < max_depth && members('[', ']', depth);
            case '"': return string();
            case 't': return word("true");
            case 'f': return word("false");
            case 'n': return word("null");
            default: return number();
        }
    }

    // The inside of an object or a list.
    bool members(char open, char close, int depth) {
        take(open);
        space();
        if (take(close)) return true;
        do {
            space();
            if (open == '{') {
                if (!string()) return false;
                space();
                if (!take(':')) return false;
                space();
            }
            if (!value(depth + 1)) return false;
            space();
        } while (take(','));
        return take(close);
    }

    bool digits() {
        const std::size_t start = at_;
        while (peek() >= '0' && peek() <= '9') ++at_;
        return at_ > start;
    }
    bool number() {
        take('-');
        if (!take('0') && !digits()) return false;
        if (take('.') && !digits()) return false;
        if (peek() == 'e' || peek() == 'E') {
            ++at_;
            if (!take('+')) take('-');
            return digits();
        }
        return true;
    }

    bool string() {
        if (!take('"')) return false;
        while (!take('"')) {
            const int c = peek();
            if (c < 0x20) return false;  // a control character, or the end
            if (c == '\\' ? !escape() : !character(c)) return false;
        }
        return true;
    }
    bool escape() {
        ++at_;
        const int c = peek();
        if (c < 0 || std::string_view("\"\\/bfnrtu").find(static_cast<char>(c)) == std::string_view::npos) return false;
        ++at_;
        for (int i = 0; c == 'u' && i < 4; ++i, ++at_)
            if (peek() < 0 || std::string_view("0123456789abcdefABCDEF").find(text_[at_]) == std::string_view::npos)
                return false;
        return true;
    }
    // One UTF-8 character: no overlong form, no surrogate, nothing above U+10FFFF.
    bool character(int lead) {
        const int more = lead < 0x80 ? 0 : lead < 0xC2 ? -1 : lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : lead < 0xF5 ? 3 : -1;
        if (more < 0) return false;
        ++at_;
        for (int i = 0; i < more; ++i, ++at_) {
            const int c = peek();
            int low = 0x80;
            int high = 0xBF;
            if (i == 0) {
                if (lead == 0xE0) low = 0xA0;
                if (lead == 0xED) high = 0x9F;
                if (lead == 0xF0) low = 0x90;
                if (lead == 0xF4) high = 0x8F;
            }
            if (c < low || c > high) return false;
        }
        return true;
    }

    std::string_view text_;
    std::size_t at_ = 0;
};

}  // namespace

JsonScan scan_json(std::string_view text) {
    return Scanner(text).run();
}

}  // namespace edgeyolo
