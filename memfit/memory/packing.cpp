#include "memfit/memory/packing.h"

#include <emmintrin.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <vector>

namespace memfit::memory {
namespace {

using Kind = PackForm::Kind;

constexpr std::uint64_t kSampled = 256;  // elements
constexpr double kWorthIt = 0.7;         // of the bytes, at most
constexpr double kMostZeros = 0.45;      // of a sample, before it counts as mostly zero
constexpr std::uint64_t kHeader = 16;

template <class Visit>
auto with_width(std::uint8_t width, Visit visit) {
  switch (width) {
    case 1:
      return visit(std::uint8_t{});
    case 2:
      return visit(std::uint16_t{});
    case 4:
      return visit(std::uint32_t{});
    default:
      return visit(std::uint64_t{});
  }
}

template <class T>
std::int64_t as_signed(T x) {
  return static_cast<std::int64_t>(static_cast<std::make_signed_t<T>>(x));
}

std::uint8_t bytes_for(std::uint64_t range) {
  return range < (1u << 8) ? 1 : range < (1u << 16) ? 2 : range < (1ull << 32) ? 4 : 8;
}

/// Bytes of the form for `count` elements of which `nonzero` are not zero.
std::uint64_t size_of(PackForm form, std::uint64_t count, std::uint64_t nonzero) {
  const std::uint64_t bits = (count + 63) / 64 * 8;
  switch (form.kind) {
    case Kind::TwoValued:
      return kHeader + bits;
    case Kind::MostlyZero:
      return kHeader + bits + nonzero * form.width;
    case Kind::Narrow:
      return kHeader + count * form.narrow;
    case Kind::None:
      break;
  }
  return 0;
}

template <class T>
PackForm guess(const T* data, std::uint64_t count, bool integer, std::uint64_t* packed) {
  const std::uint64_t sampled = std::min(count, kSampled);
  const std::uint64_t stride = count / sampled;
  PackForm form;
  form.width = sizeof(T);
  const T a = data[0];
  T b = a;
  bool two = true;
  std::uint64_t zeros = 0;
  std::int64_t low = as_signed(a), high = low;
  // An odd walk: columns of a matrix must not look like the whole of it.
  for (std::uint64_t i = 0, at = 0; i < sampled; ++i, at = (at + stride + i % 7) % count) {
    const T x = data[at];
    if (x != a && x != b) {
      two = two && a == b;
      b = x;
    }
    zeros += x == 0 ? 1 : 0;
    low = std::min(low, as_signed(x));
    high = std::max(high, as_signed(x));
  }
  // A few values that are not zero need not all be the same one.
  const bool few = sampled - zeros < 8 && sizeof(T) > 1;
  if (two && !few) {
    form.kind = Kind::TwoValued;
    *packed = size_of(form, count, 0);
    return form;
  }
  const double share = static_cast<double>(zeros) / static_cast<double>(sampled);
  if (sizeof(T) > 1 && share > kMostZeros) {
    form.kind = Kind::MostlyZero;
    // A sample is off by a few per cent; what does not fit is not packed.
    const double nonzero = std::min(1.0, (1 - share) + 0.06);
    *packed = size_of(form, count, static_cast<std::uint64_t>(nonzero * static_cast<double>(count)));
    if (static_cast<double>(*packed) < kWorthIt * static_cast<double>(count * sizeof(T))) return form;
  }
  if (integer && sizeof(T) > 1) {
    // Twice the sample's range: indices and counts have a tail.
    const std::uint64_t range = (static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low)) * 2;
    form.kind = Kind::Narrow;
    form.narrow = bytes_for(range);
    *packed = size_of(form, count, 0);
    if (form.narrow < sizeof(T)) return form;
  }
  return PackForm{};
}

struct Bits64 {
  std::uint64_t b;  // bit k: element k is b
  bool other;       // some element is neither a nor b
};

template <class T>
Bits64 compare64(const T* from, T a, T b) {
  std::uint64_t word = 0, other = 0;
  for (unsigned k = 0; k < 64; ++k) {
    word |= static_cast<std::uint64_t>(from[k] == b) << k;
    other |= static_cast<std::uint64_t>((from[k] != a) & (from[k] != b));
  }
  return {word, other != 0};
}

// Masks of floats are the common case, and worth the instructions that every x86-64 has.
Bits64 compare64(const std::uint32_t* from, std::uint32_t a, std::uint32_t b) {
  const __m128i as = _mm_set1_epi32(static_cast<int>(a)), bs = _mm_set1_epi32(static_cast<int>(b));
  __m128i known = _mm_set1_epi32(-1);
  std::uint64_t word = 0;
  for (unsigned k = 0; k < 64; k += 16) {
    __m128i is[4];
    for (unsigned j = 0; j < 4; ++j) {
      const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k + 4 * j));
      is[j] = _mm_cmpeq_epi32(x, bs);
      known = _mm_and_si128(known, _mm_or_si128(is[j], _mm_cmpeq_epi32(x, as)));
    }
    const __m128i bytes = _mm_packs_epi16(_mm_packs_epi32(is[0], is[1]), _mm_packs_epi32(is[2], is[3]));
    word |= static_cast<std::uint64_t>(static_cast<unsigned>(_mm_movemask_epi8(bytes))) << k;
  }
  return {word, _mm_movemask_epi8(known) != 0xffff};
}

template <class T>
std::optional<std::uint64_t> pack_two(const T* from, std::uint64_t count, unsigned char* to) {
  const T a = from[0];
  T b = a;
  for (std::uint64_t i = 1; i < count; ++i) {
    if (from[i] != a) {
      b = from[i];
      break;
    }
  }
  std::memcpy(to, &a, sizeof(T));
  std::memcpy(to + 8, &b, sizeof(T));
  unsigned char* bits = to + kHeader;
  std::uint64_t i = 0;
  for (; i + 64 <= count; i += 64, bits += 8) {
    const Bits64 is = compare64(from + i, a, b);
    if (is.other) return std::nullopt;
    std::memcpy(bits, &is.b, 8);
  }
  if (i < count) {
    std::uint64_t word = 0;
    for (unsigned k = 0; i + k < count; ++k) {
      if (from[i + k] != a && from[i + k] != b) return std::nullopt;
      word |= static_cast<std::uint64_t>(from[i + k] == b) << k;
    }
    std::memcpy(bits, &word, 8);
  }
  return size_of({Kind::TwoValued, sizeof(T), 0}, count, 0);
}

template <class T>
void unpack_two(const unsigned char* from, std::uint64_t count, T* to) {
  T ab[2];
  std::memcpy(&ab[0], from, sizeof(T));
  std::memcpy(&ab[1], from + 8, sizeof(T));
  const T difference = static_cast<T>(ab[0] ^ ab[1]);
  const unsigned char* bits = from + kHeader;
  for (std::uint64_t i = 0; i < count; i += 64, bits += 8) {
    std::uint64_t word;
    std::memcpy(&word, bits, 8);
    const unsigned most = static_cast<unsigned>(std::min<std::uint64_t>(64, count - i));
    for (unsigned k = 0; k < most; ++k) {
      to[i + k] = static_cast<T>(ab[0] ^ (difference & static_cast<T>(-static_cast<T>((word >> k) & 1))));
    }
  }
}

template <class T>
std::optional<std::uint64_t> pack_zeros(const T* from, std::uint64_t count, unsigned char* to, std::uint64_t capacity) {
  const PackForm form{Kind::MostlyZero, sizeof(T), 0};
  const std::uint64_t before = size_of(form, count, 0);
  if (capacity < before) return std::nullopt;
  const std::uint64_t room = (capacity - before) / sizeof(T);
  unsigned char* bits = to + kHeader;
  T* values = reinterpret_cast<T*>(to + before);
  std::uint64_t used = 0;
  for (std::uint64_t i = 0; i < count; i += 64, bits += 8) {
    const unsigned most = static_cast<unsigned>(std::min<std::uint64_t>(64, count - i));
    if (room - used < most) {  // without a branch for each element there must be room for all
      std::uint64_t here = 0;
      for (unsigned k = 0; k < most; ++k) here += from[i + k] != 0 ? 1 : 0;
      if (room - used < here) return std::nullopt;
      std::uint64_t word = 0;
      for (unsigned k = 0; k < most; ++k) {
        if (from[i + k] == 0) continue;
        word |= std::uint64_t{1} << k;
        values[used++] = from[i + k];
      }
      std::memcpy(bits, &word, 8);
      continue;
    }
    std::uint64_t word = 0;
    for (unsigned k = 0; k < most; ++k) {
      const bool there = from[i + k] != 0;
      values[used] = from[i + k];
      used += there ? 1 : 0;
      word |= static_cast<std::uint64_t>(there) << k;
    }
    std::memcpy(bits, &word, 8);
  }
  std::memcpy(to, &used, 8);
  return size_of(form, count, used);
}

template <class T>
void unpack_zeros(const unsigned char* from, std::uint64_t count, T* to) {
  const unsigned char* bits = from + kHeader;
  const T* values = reinterpret_cast<const T*>(from + size_of({Kind::MostlyZero, sizeof(T), 0}, count, 0));
  std::memset(to, 0, count * sizeof(T));
  for (std::uint64_t i = 0; i < count; i += 64, bits += 8) {
    std::uint64_t word;
    std::memcpy(&word, bits, 8);
    while (word != 0) {
      to[i + static_cast<unsigned>(__builtin_ctzll(word))] = *values++;
      word &= word - 1;
    }
  }
}

template <class T, class Short>
bool narrow_into(const T* from, std::uint64_t count, std::int64_t low, Short* to) {
  for (std::uint64_t i = 0; i < count; ++i)
    to[i] = static_cast<Short>(static_cast<std::uint64_t>(as_signed(from[i]) - low));
  return true;
}

template <class T>
std::optional<std::uint64_t> pack_narrow(PackForm form, const T* from, std::uint64_t count, unsigned char* to) {
  std::int64_t low = as_signed(from[0]), high = low;
  for (std::uint64_t i = 0; i < count; ++i) {
    low = std::min(low, as_signed(from[i]));
    high = std::max(high, as_signed(from[i]));
  }
  if (bytes_for(static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low)) > form.narrow) return std::nullopt;
  std::memcpy(to, &low, 8);
  with_width(form.narrow,
             [&](auto s) { return narrow_into(from, count, low, reinterpret_cast<decltype(s)*>(to + kHeader)); });
  return size_of(form, count, 0);
}

template <class T>
void unpack_narrow(PackForm form, const unsigned char* from, std::uint64_t count, T* to) {
  std::int64_t low;
  std::memcpy(&low, from, 8);
  with_width(form.narrow, [&](auto s) {
    const auto* values = reinterpret_cast<const decltype(s)*>(from + kHeader);
    for (std::uint64_t i = 0; i < count; ++i) to[i] = static_cast<T>(low + static_cast<std::int64_t>(values[i]));
    return true;
  });
}

PackSpeed measure(Kind kind) {
  using Clock = std::chrono::steady_clock;
  constexpr std::uint64_t kCount = 1 << 18;
  std::vector<std::uint32_t> data(kCount), back(kCount);
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const auto random = static_cast<std::uint32_t>((i * 0x9E3779B97F4A7C15ull) >> 40);
    data[i] = kind == Kind::Narrow      ? random & 255
              : kind == Kind::TwoValued ? (random & 1) * 0x3f800000u
                                        : (random & 1) * (random | 1);
  }
  const PackForm form{kind, 4, static_cast<std::uint8_t>(kind == Kind::Narrow ? 1 : 0)};
  std::vector<unsigned char> packed(kCount * 5);
  PackSpeed best{1, 1};
  for (int i = 0; i < 4; ++i) {  // the first round only makes the pages
    const auto t0 = Clock::now();
    pack(form, data.data(), kCount * 4, packed.data(), packed.size());
    const auto t1 = Clock::now();
    unpack(form, packed.data(), kCount * 4, back.data());
    const auto t2 = Clock::now();
    best.pack = std::min(best.pack, std::chrono::duration<double>(t1 - t0).count() / (kCount * 4));
    best.unpack = std::min(best.unpack, std::chrono::duration<double>(t2 - t1).count() / (kCount * 4));
  }
  return best;
}

}  // namespace

PackForm guess_form(const void* data, std::uint64_t bytes, std::uint8_t width, bool integer, std::uint64_t* packed) {
  if (bytes < 64 || bytes % width != 0) return {};
  return with_width(
      width, [&](auto t) { return guess(static_cast<const decltype(t)*>(data), bytes / width, integer, packed); });
}

std::optional<std::uint64_t> pack(PackForm form, const void* data, std::uint64_t bytes, void* to,
                                  std::uint64_t capacity) {
  const std::uint64_t count = bytes / form.width;
  if (form.kind == Kind::None || size_of(form, count, 0) > capacity) return std::nullopt;
  auto* out = static_cast<unsigned char*>(to);
  return with_width(form.width, [&](auto t) -> std::optional<std::uint64_t> {
    const auto* from = static_cast<const decltype(t)*>(data);
    if (form.kind == Kind::TwoValued) return pack_two(from, count, out);
    if (form.kind == Kind::MostlyZero) return pack_zeros(from, count, out, capacity);
    return pack_narrow(form, from, count, out);
  });
}

void unpack(PackForm form, const void* packed, std::uint64_t bytes, void* to) {
  const std::uint64_t count = bytes / form.width;
  const auto* in = static_cast<const unsigned char*>(packed);
  with_width(form.width, [&](auto t) {
    auto* out = static_cast<decltype(t)*>(to);
    if (form.kind == Kind::TwoValued) unpack_two(in, count, out);
    else if (form.kind == Kind::MostlyZero) unpack_zeros(in, count, out);
    else unpack_narrow(form, in, count, out);
    return true;
  });
}

PackSpeed pack_speed(Kind kind) {
  static const std::array<PackSpeed, 3> speeds{measure(Kind::TwoValued), measure(Kind::MostlyZero),
                                               measure(Kind::Narrow)};
  return kind == Kind::None ? PackSpeed{} : speeds[static_cast<std::size_t>(kind) - 1];
}

}  // namespace memfit::memory
