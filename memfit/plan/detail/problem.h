// A recorded step in the form the search wants: plain integers, uses per value, the memory profile when nothing is dropped.
// Private to plan/. Threads: plain data. Cost: one pass to make.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "memfit/trace/step.h"

namespace memfit::plan::detail {

/// Lists of ints, one after the other.
struct Lists {
  std::vector<std::uint32_t> offsets{0};
  std::vector<std::int32_t> items;
  std::span<const std::int32_t> operator[](std::size_t i) const { return {items.data() + offsets[i], offsets[i + 1] - offsets[i]}; }
};

/// A stretch of time in which the program holds `value` but no op uses it: from after op `a` to before op `b`.
/// b == n+1: nobody asks for it again.
struct Gap {
  std::int32_t value, a, b;
};

/// Stages: stage t is what happens before op t and op t itself; stage n is the end of the step.
struct Problem {
  std::int32_t n = 0, m = 0;
  std::vector<std::int64_t> bytes, packed;    // per value; packed == 0: not packable
  std::vector<float> pack_cost, unpack_cost;
  std::vector<std::int32_t> birth, death;     // held at the start of stage t when birth < t <= death; -1 for sources, n for survivors
  std::vector<std::int32_t> producer;         // -1: a source
  std::vector<std::int32_t> overwrites;       // -1: nothing
  std::vector<std::uint8_t> movable;          // may be dropped, packed or offloaded at all
  std::vector<double> cost;                   // per op, seconds
  std::vector<std::int64_t> workspace;
  std::vector<std::uint8_t> replayable;
  Lists inputs, outputs;                      // per op
  Lists uses;                                 // per value: ops, and n for a survivor that is needed
  std::vector<std::int64_t> base, added;      // per stage: held at its start; what op t adds while it runs
  std::vector<double> start;                  // per stage: when op t starts if nothing is done (size n+1)
  double offload_cost = 0;                    // seconds a byte out and back, that ops take longer
  std::vector<Gap> gaps;                      // of movable values, with at least one stage strictly inside or no use afterwards
};

Problem make_problem(const trace::Step& step);

}  // namespace memfit::plan::detail
