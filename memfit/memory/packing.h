// Lossless short forms of tensor bytes of little information, after the lossless half of Gist (Jain et al., ISCA 2018):
// two-valued contents (dropout masks, booleans) as bits, mostly-zero ones as a bitmap and values, integers of small
// range narrowed. Contents are compared as bit patterns, so -0.0 is not 0.0, and what comes back is bitwise what went
// in. Not here: when to pack (plan/), where the packed bytes live (engine/). Threads: pure. Cost: one or two passes
// over the bytes; measured by pack_speed().
#pragma once

#include <cstdint>
#include <optional>

namespace memfit::memory {

struct PackForm {
  enum class Kind : std::uint8_t { None, TwoValued, MostlyZero, Narrow };
  Kind kind = Kind::None;
  std::uint8_t width = 0;   // bytes of an element: 1, 2, 4 or 8
  std::uint8_t narrow = 0;  // Narrow: bytes kept of each element
};

/// What a sample of `bytes` bytes at `data` looks like; Kind::None when no form would make it a good deal smaller.
/// `width`: bytes of an element. `integer`: the elements are integers. `packed`: bytes that it will likely need.
PackForm guess_form(const void* data, std::uint64_t bytes, std::uint8_t width, bool integer, std::uint64_t* packed);

/// Writes the short form of all `bytes` bytes to `to`. Nothing when some of them do not have that form, or it takes
/// more than `capacity` bytes; then what is at `to` is undefined. Returns: bytes written.
std::optional<std::uint64_t> pack(PackForm form, const void* data, std::uint64_t bytes, void* to,
                                  std::uint64_t capacity);

/// The reverse. Requires: `packed` was written by pack() with this form and this many bytes.
void unpack(PackForm form, const void* packed, std::uint64_t bytes, void* to);

/// Seconds a byte (of the long form) that packing and unpacking take here, measured once.
struct PackSpeed {
  double pack = 0, unpack = 0;
};
PackSpeed pack_speed(PackForm::Kind kind);

}  // namespace memfit::memory
