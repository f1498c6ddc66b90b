#include "memfit/plan/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace memfit::plan {
namespace {

using trace::kNone;
using trace::Op;
using trace::OpId;
using trace::Replay;
using trace::Seconds;
using trace::Step;
using trace::Value;
using trace::ValueId;

enum : std::uint8_t { kPresent = 1, kPacked = 2, kOutside = 4, kWriting = 8, kFetching = 16, kHeld = 32 };

class Simulator {
 public:
  Simulator(const Step& step, const Plan& plan, const Traffic& traffic)
      : step_(step), plan_(plan), traffic_(traffic), n_(static_cast<OpId>(step.ops.size())), state_(step.values.size(), 0) {}

  Simulation run() {
    if (start())
      for (OpId i = 0; i < n_; ++i)
        if (!list(plan_.before(i), i, i) || !original(i) || !list(plan_.after(i), i, i + 1)) break;
    if (out_.possible && list(plan_.before(n_), n_, n_)) finish();
    return std::move(out_);
  }

 private:
  bool fail(OpId op, std::string text) {
    if (!out_.possible) return false;
    out_.possible = false;
    out_.fault_op = op;
    out_.fault = fmt::format("at op {}: {}", op, text);
    return false;
  }

  void see(std::uint64_t more, OpId at) {
    const Bytes now = Bytes(live_ + more);
    if (now > out_.peak) {
      out_.peak = now;
      out_.peak_op = at;
    }
  }

  std::uint64_t size(ValueId v) const { return step_.values[v].bytes.count(); }

  void forget(ValueId v, std::uint8_t what) {
    if (state_[v] & what & (kPresent | kFetching)) live_ -= size(v);
    if (state_[v] & what & kPacked) live_ -= step_.values[v].packed_bytes.count();
    if (state_[v] & what & kOutside) outside_ -= size(v);
    state_[v] &= static_cast<std::uint8_t>(~what);
  }

  bool start() {
    double sum = 0;
    for (const Op& op : step_.ops) sum += op.seconds.count();
    stretch_ = sum > 0 ? std::max(1.0, step_.seconds.count() / sum) : 1.0;
    if (sum <= 0) clock_ = step_.seconds.count();
    live_ = step_.fixed_bytes.count();
    done_.assign(step_.values.size(), 0.0);
    dying_.assign(n_ + 1, {});
    if (plan_.offsets.size() != 2 * (static_cast<std::size_t>(n_) + 1) + 1)
      return fail(0, fmt::format("the plan is for another step ({} lists, the step has {} ops)", plan_.offsets.size(), n_));
    for (ValueId v : plan_.starts_offloaded) {
      if (v >= step_.values.size() || !step_.is_source(v) || step_.values[v].pinned || state_[v])
        return fail(0, fmt::format("value {} cannot start outside", v));
      state_[v] = kOutside;
      outside_ += size(v);
    }
    for (ValueId v = 0; v < step_.values.size(); ++v) {
      if (step_.values[v].death != kNone) dying_[step_.values[v].death].push_back(v);
      if (!step_.is_source(v)) continue;
      if (!(state_[v] & kOutside)) {
        state_[v] |= kPresent;
        live_ += size(v);
      }
      state_[v] |= kHeld;
    }
    out_.outside_peak = Bytes(outside_);
    see(0, 0);
    return true;
  }

  /// Make the outputs of `id` from its inputs. A value that is there already is made a second time and given up at once.
  bool produce(OpId id, bool preserve, OpId at, bool again) {
    const Op& op = step_.ops[id];
    for (ValueId v : step_.inputs(op))
      if (!(state_[v] & kPresent)) return fail(at, fmt::format("{} (op {}) needs value {}, which is not there", step_.op_name(id), id, v));
    std::uint64_t fresh = 0, spare = 0;
    for (ValueId v : step_.outputs(op)) {
      const ValueId old = step_.values[v].overwrites;
      if (old == kNone || preserve) fresh += size(v);
      if (old != kNone && !preserve && (state_[old] & kWriting)) return fail(at, fmt::format("value {} is overwritten while it is being written out", old));
      if (state_[v] & kFetching) return fail(at, fmt::format("value {} is made while it is being fetched", v));
    }
    see(fresh + op.workspace.count(), at);
    live_ += fresh;
    for (ValueId v : step_.outputs(op)) {
      const ValueId old = step_.values[v].overwrites;
      if (old != kNone && !preserve) {  // its bytes go over to v
        live_ += size(old);
        forget(old, kPresent | kPacked | kOutside);
      }
      if (again && (state_[v] & kPresent)) spare += size(v);
      state_[v] |= kPresent;
    }
    live_ -= spare;
    return true;
  }

  bool original(OpId i) {
    if (!produce(i, false, i, false)) return false;
    clock_ += step_.ops[i].seconds.count() * stretch_;
    for (ValueId v : step_.outputs(step_.ops[i])) state_[v] |= kHeld;
    for (ValueId v : dying_[i]) {
      if (state_[v] & kWriting) return fail(i, fmt::format("value {} dies while it is being written out", v));
      forget(v, 0xff);
    }
    return true;
  }

  bool list(std::span<const Instruction> instructions, OpId at, OpId known_ops) {
    for (const Instruction& in : instructions)
      if (!execute(in, at, known_ops)) return false;
    return true;
  }

  bool execute(const Instruction& in, OpId at, OpId known_ops) {
    if (in.action == Action::Replay) {
      if (in.target >= known_ops) return fail(at, fmt::format("op {} has not run yet, it cannot run again", in.target));
      const Op& op = step_.ops[in.target];
      if (op.replay != Replay::Yes)
        return fail(at, fmt::format("op {} ({}) cannot run again: {}", in.target, step_.op_name(in.target), replay_name(op.replay)));
      out_.recompute += op.seconds;
      clock_ += op.seconds.count();
      ++out_.replays;
      return produce(in.target, in.preserve, at, true);
    }
    const ValueId v = in.target;
    if (v >= step_.values.size()) return fail(at, fmt::format("there is no value {}", v));
    if (step_.values[v].pinned && (state_[v] & kHeld)) return fail(at, fmt::format("value {} is pinned", v));
    switch (in.action) {
      case Action::Drop: return drop(v, at);
      case Action::Pack: return pack(v, at);
      case Action::Unpack: return unpack(v, in.preserve, at);
      default: return traffic(in.action, v, at);
    }
  }

  bool drop(ValueId v, OpId at) {
    if (!(state_[v] & kPresent)) return fail(at, fmt::format("value {} is dropped but is not there", v));
    if (state_[v] & kWriting) return fail(at, fmt::format("value {} is dropped while it is being written out", v));
    forget(v, kPresent);
    return true;
  }

  bool pack(ValueId v, OpId at) {
    const Value& value = step_.values[v];
    if (!value.packable) return fail(at, fmt::format("value {} cannot be packed", v));
    if (!(state_[v] & kPresent) || (state_[v] & kPacked)) return fail(at, fmt::format("value {} is packed but is not there", v));
    see(value.packed_bytes.count(), at);
    live_ += value.packed_bytes.count();
    forget(v, kPresent);
    state_[v] |= kPacked;
    spend_packing(value.pack_seconds);
    return true;
  }

  bool unpack(ValueId v, bool preserve, OpId at) {
    if (!(state_[v] & kPacked) || (state_[v] & kPresent)) return fail(at, fmt::format("value {} is unpacked but is not packed", v));
    see(size(v), at);
    live_ += size(v);
    state_[v] |= kPresent;
    if (!preserve) forget(v, kPacked);
    spend_packing(step_.values[v].unpack_seconds);
    return true;
  }

  void spend_packing(double seconds) {
    clock_ += seconds;
    out_.packing += Seconds(seconds);
  }

  void wait_for(ValueId v) {
    if (done_[v] <= clock_) return;
    out_.exposed += Seconds(done_[v] - clock_);
    clock_ = done_[v];
  }

  void spend_copying(double bytes) {
    const double seconds = traffic_.busy_seconds_per_byte * bytes;
    clock_ += seconds;
    out_.exposed += Seconds(seconds);
  }

  bool traffic(Action action, ValueId v, OpId at) {
    const double bytes = static_cast<double>(size(v));
    std::uint8_t& s = state_[v];
    if (traffic_.write_bytes_per_second <= 0 || traffic_.read_bytes_per_second <= 0)
      return fail(at, fmt::format("value {} is offloaded but there is no place to offload to", v));
    if (action == Action::StartOffload) {
      if (!(s & kPresent) || (s & (kOutside | kWriting))) return fail(at, fmt::format("value {} is written out but is not there, or is outside already", v));
      writer_ = std::max(writer_, clock_) + traffic_.latency.count() + bytes / traffic_.write_bytes_per_second;
      done_[v] = writer_;
      s |= kWriting | kOutside;
      outside_ += size(v);
      out_.outside_peak = std::max(out_.outside_peak, Bytes(outside_));
      out_.offload_write += Bytes(size(v));
      spend_copying(bytes);
    } else if (action == Action::FinishOffload) {
      if (!(s & kWriting)) return fail(at, fmt::format("value {} is not being written out", v));
      wait_for(v);
      forget(v, kWriting | kPresent);
    } else if (action == Action::StartFetch) {
      if (!(s & kOutside) || (s & (kPresent | kFetching | kWriting))) return fail(at, fmt::format("value {} is fetched but is not outside", v));
      reader_ = std::max(reader_, clock_) + traffic_.latency.count() + bytes / traffic_.read_bytes_per_second;
      done_[v] = reader_;
      s |= kFetching;
      see(size(v), at);
      live_ += size(v);
      out_.offload_read += Bytes(size(v));
      spend_copying(bytes);
    } else if (action == Action::FinishFetch) {
      if (!(s & kFetching)) return fail(at, fmt::format("value {} is not being fetched", v));
      wait_for(v);
      s = static_cast<std::uint8_t>((s & ~kFetching) | kPresent);
    } else {
      if (s & kWriting) return fail(at, fmt::format("the copy of value {} is dropped while it is being written", v));
      forget(v, kOutside);
    }
    return true;
  }

  /// Everything the program still needs must be there, except what starts the next step outside.
  void finish() {
    std::vector<std::uint32_t> may_be_outside;
    for (ValueId v : plan_.starts_offloaded) may_be_outside.push_back(step_.values[v].storage);
    std::sort(may_be_outside.begin(), may_be_outside.end());
    for (ValueId v = 0; v < step_.values.size(); ++v) {
      const Value& value = step_.values[v];
      if (value.death != kNone || !value.needed_after) continue;
      const bool away = std::binary_search(may_be_outside.begin(), may_be_outside.end(), value.storage);
      if (away && ((state_[v] & (kPresent | kFetching | kWriting)) || !(state_[v] & kOutside)))
        fail(n_, fmt::format("value {} must be outside at the end of the step, as its storage was at the start", v));
      if (!away && !(state_[v] & kPresent)) fail(n_, fmt::format("value {} outlives the step but is not there at its end", v));
    }
    out_.step = Seconds(clock_);
  }

  const Step& step_;
  const Plan& plan_;
  const Traffic traffic_;
  const OpId n_;
  std::vector<std::uint8_t> state_;
  std::vector<double> done_;  // when the latest copy of a value is complete
  std::vector<std::vector<ValueId>> dying_;
  std::uint64_t live_ = 0, outside_ = 0;
  double clock_ = 0, writer_ = 0, reader_ = 0, stretch_ = 1;
  Simulation out_;
};

}  // namespace

Simulation simulate(const Step& step, const Plan& plan, const Traffic& traffic) { return Simulator(step, plan, traffic).run(); }

Plan keep_everything(const Step& step) {
  Plan plan;
  plan.offsets.assign(2 * (step.ops.size() + 1) + 1, 0);
  const Simulation result = simulate(step, plan);
  plan.limit = plan.predicted_peak = result.peak;
  plan.predicted_step = result.step;
  return plan;
}

}  // namespace memfit::plan
