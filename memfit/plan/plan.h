// What to do with the values of one recorded step, as plain data that the engine carries out by walking it.
// Not here: how it was chosen (compute_plan.h), what it would do (simulate.h).
// Threads: plain data. Cost: 8 bytes an instruction.
//
// Note [How a Plan is carried out]
// For op i of the recorded step, in this order: the instructions of before(i), the op itself, those of after(i).
// before(n) is carried out after the last op, before the program goes on. Instructions of one list run in order.
//   Replay op     run the recorded op again. Its inputs are there. Its outputs come into being: for a value that the program
//                 holds this is its restoration, for a ghost a temporary. An output that overwrites a value eats that value's
//                 bytes, unless `preserve` is set: then the op works on a copy and the older value stays.
//                 What of it is not wanted is dropped by the Drop instructions that follow.
//   Drop v        free the bytes of v (evict a held value, free a temporary).
//   Pack v        replace v by its packed form.
//   Unpack v      the reverse. With `preserve` the packed form stays beside it, and a Drop takes the unpacked bytes again.
//   StartOffload v   begin to copy v out in the background; its bytes stay until
//   FinishOffload v  wait for that copy, then free the bytes.
//   StartFetch v     take bytes for v and begin to copy it back;   FinishFetch v  wait until it is there.
//   DropCopy v       forget the copy outside. Until then it stays good after a fetch, so that a later Drop needs no second
//                    StartOffload. A write to v, or its death, forgets it too.
// What the program itself drops needs no instruction: what is kept of it, in whatever form, goes with its last handle, before after(i).
// Between two ops no temporaries are left: every ghost a list brings to life it also drops. A value in `starts_offloaded` (a source) is outside before op 0:
// it was left so by the end of the previous step, or is moved out before the first planned one.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memfit/core/bytes.h"
#include "memfit/trace/step.h"

namespace memfit::plan {

enum class Action : std::uint8_t { Replay, Drop, Pack, Unpack, StartOffload, FinishOffload, StartFetch, FinishFetch, DropCopy };
inline constexpr std::uint8_t kActionCount = 9;
std::string_view action_name(Action action);

struct Instruction {
  Action action = Action::Drop;
  bool preserve = false;     // Replay: work on copies of what the op would overwrite. Unpack: keep the packed form
  std::uint32_t target = 0;  // an op for Replay, a value otherwise

  bool operator==(const Instruction&) const = default;
};

/// What a plan does with one value; of several gaps, with the longest that is not kept.
enum class Fate : std::uint8_t { Keep, Recompute, Pack, Offload };
std::string_view fate_name(Fate fate);

struct ValueSummary {
  trace::ValueId value = 0;
  Fate fate = Fate::Keep;
  std::uint32_t gaps = 0;           // how often it goes away and comes back
  trace::Seconds seconds{0};        // what bringing it back takes, shared replays split evenly
  bool operator==(const ValueSummary&) const = default;
};

struct Plan {
  Bytes limit;
  Bytes predicted_peak;
  trace::Seconds predicted_step{0};      // the recorded step's time and all of the below
  trace::Seconds recompute{0};           // replays
  trace::Seconds packing{0};             // packing and unpacking
  trace::Seconds exposed{0};             // waiting for traffic that nothing hides
  Bytes offload_write, offload_read;
  std::vector<trace::ValueId> starts_offloaded;
  std::vector<std::uint32_t> offsets;    // 2 * (n + 1) + 1 of them: before(0), after(0), before(1), ...
  std::vector<Instruction> instructions;
  std::vector<ValueSummary> values;      // those that are not simply kept

  std::span<const Instruction> before(trace::OpId op) const { return list(2 * op); }
  std::span<const Instruction> after(trace::OpId op) const { return list(2 * op + 1); }
  bool operator==(const Plan&) const = default;

 private:
  std::span<const Instruction> list(std::size_t k) const {
    if (k + 1 >= offsets.size()) return {};
    return {instructions.data() + offsets[k], offsets[k + 1] - offsets[k]};
  }
};

}  // namespace memfit::plan
