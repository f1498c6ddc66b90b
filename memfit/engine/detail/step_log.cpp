#include "memfit/engine/detail/step_log.h"

#include <algorithm>

#include "memfit/engine/detail/ticks.h"

namespace memfit::engine::detail {
namespace {

using trace::Category;
using trace::Replay;

trace::Seconds seconds_of(std::uint64_t ticks) {
  return trace::Seconds(static_cast<double>(ticks_to_ns(ticks)) * 1e-9);
}

/// One stretch of a log on its way to a Step.
class Cut {
 public:
  Cut(const StepLog& log, std::uint32_t begin, std::uint32_t end)
      : log_(log),
        begin_(begin),
        end_(end),
        id_(log.values.size(), StepLog::kNone),
        read_later_(log.values.size(), false),
        overwritten_(log.values.size(), false) {
    std::uint32_t storages = 0;
    for (const StepLog::Value& v : log.values) storages = std::max(storages, v.storage + 1);
    facts_.resize(storages);
  }

  trace::Step take() {
    look();
    std::uint64_t sources = add_sources();
    for (std::uint32_t i = begin_; i < end_; ++i) add_op(i);
    finish_values();
    trace::Step step = builder_.take();
    // What filled the first op's storages had their bytes before.
    for (const std::uint32_t v : log_.outputs(log_.ops[begin_])) {
      if (log_.values[v].flags & StepLog::kFilled) sources += log_.values[v].bytes;
    }
    const std::uint64_t live = log_.ops[begin_].live;
    step.fixed_bytes = Bytes(live > sources ? live - sources : 0);
    return step;
  }

 private:
  struct Facts {
    std::uint8_t flags = 0;
    bool source = false;  // was there before
    bool outlives = false;
  };

  bool was_there(const StepLog::Value& v) const { return v.producer == StepLog::kNone || v.producer < begin_; }
  bool dies_inside(std::uint32_t id) const {
    const StepLog::Value& v = log_.values[id];
    if (v.death == StepLog::kNone || v.death >= end_) return false;
    // When a program ends everything goes, after its last op. What it carries from step to step would have gone on.
    const bool carried = (facts_[v.storage].flags & (StepLog::kParameter | StepLog::kUpdated)) != 0;
    return !(carried && v.death + 1 == log_.size() && !overwritten_[id]);
  }

  void look() {
    for (const StepLog::Value& v : log_.values) {
      facts_[v.storage].flags |= v.flags;
      if (v.overwrites != StepLog::kNone) overwritten_[v.overwrites] = true;
    }
    for (std::uint32_t i = end_; i < log_.size(); ++i) {
      for (const std::uint32_t v : log_.inputs(log_.ops[i])) read_later_[v] = true;
    }
    first_backward_ = end_;
    for (std::uint32_t i = end_; i-- > begin_;) {
      if (log_.ops[i].flags & StepLog::kBackward) first_backward_ = i;
    }
    for (std::uint32_t id = 0; id < log_.values.size(); ++id) {
      const StepLog::Value& v = log_.values[id];
      Facts& facts = facts_[v.storage];
      if (v.death != StepLog::kNone && v.death < begin_) continue;
      if (v.producer != StepLog::kNone && v.producer >= end_) continue;
      facts.source = facts.source || was_there(v);
      facts.outlives = facts.outlives || !dies_inside(id);
    }
  }

  std::uint64_t add_sources() {
    std::vector<bool> used(log_.values.size(), false);
    for (std::uint32_t i = begin_; i < end_; ++i) {
      for (const std::uint32_t v : log_.inputs(log_.ops[i])) used[v] = true;
    }
    std::uint64_t bytes = 0;
    for (std::uint32_t v = 0; v < log_.values.size(); ++v) {
      const StepLog::Value& value = log_.values[v];
      if (!was_there(value) || (value.death != StepLog::kNone && value.death < begin_)) continue;
      if (!used[v] && !dies_inside(v)) continue;  // no op touches it: among the fixed bytes
      id_[v] = builder_.add_source(plain(value));
      bytes += value.bytes;
    }
    return bytes;
  }

  trace::Value plain(const StepLog::Value& v) {
    trace::Value out;
    out.bytes = Bytes(v.bytes);
    out.storage = v.storage;
    out.pinned = (v.flags & StepLog::kPinned) != 0;
    if (v.pack != memory::PackForm::Kind::None) {
      const memory::PackSpeed speed = memory::pack_speed(v.pack);
      out.packable = true;
      out.packed_bytes = Bytes(v.packed);
      out.pack_seconds = static_cast<float>(speed.pack * static_cast<double>(v.bytes));
      out.unpack_seconds = static_cast<float>(speed.unpack * static_cast<double>(v.bytes));
    }
    if (v.shape != StepLog::kNone) {
      const std::int64_t* dims = log_.shapes.data() + v.shape;
      out.shape = builder_.intern_shape({dims + 1, static_cast<std::size_t>(dims[0])});
    }
    return out;
  }

  void add_op(std::uint32_t i) {
    const StepLog::Op& op = log_.ops[i];
    trace::Op out;
    out.hash = op.hash;
    out.name = builder_.intern(op.name);
    out.seconds = seconds_of(op.ticks);
    out.workspace = Bytes(op.workspace);
    out.replay = op.replay;
    inputs_.clear();
    for (const std::uint32_t v : log_.inputs(op)) inputs_.push_back(id_[v]);
    outputs_.clear();
    for (const std::uint32_t v : log_.outputs(op)) {
      const StepLog::Value& value = log_.values[v];
      outputs_.push_back(plain(value));
      if (value.overwrites == StepLog::kNone) continue;
      outputs_.back().overwrites = id_[value.overwrites];
      if (facts_[value.storage].outlives && out.replay == Replay::Yes) out.replay = Replay::WritesSource;
    }
    trace::ValueId first = 0;
    builder_.add_op(out, inputs_, outputs_, &first);
    for (const std::uint32_t v : log_.outputs(op)) id_[v] = first++;
  }

  void finish_values() {
    for (std::uint32_t v = 0; v < log_.values.size(); ++v) {
      if (id_[v] == StepLog::kNone) continue;
      const StepLog::Value& value = log_.values[v];
      trace::Value& out = builder_.value(id_[v]);
      if (dies_inside(v)) {
        out.death = value.death - begin_;
      } else {
        const bool died_unread = value.death != StepLog::kNone && value.death >= end_ && !read_later_[v];
        out.needed_after = !died_unread && !(value.flags & StepLog::kUnread);
      }
      out.category = category(v);
    }
  }

  // Guesses from use; exact only for parameters and their gradients.
  Category category(std::uint32_t id) const {
    const StepLog::Value& v = log_.values[id];
    const Facts& facts = facts_[v.storage];
    if (facts.flags & StepLog::kParameter) return Category::Parameter;
    if (facts.flags & StepLog::kGradient) return Category::Gradient;
    if ((facts.flags & StepLog::kUpdated) && (facts.source || facts.outlives)) return Category::OptimizerState;
    if (was_there(v)) return dies_inside(id) ? Category::Input : Category::Buffer;
    const StepLog::Op& op = log_.ops[v.producer];
    const bool backward = (op.flags & StepLog::kBackward) != 0;
    if (!backward && (op.input_count == 0 || op.replay == Replay::ReadsForeignMemory)) return Category::Input;
    const bool saved =
        v.producer < first_backward_ && first_backward_ < end_ && (!dies_inside(id) || v.death >= first_backward_);
    return saved ? Category::Activation : Category::Temporary;
  }

  const StepLog& log_;
  std::uint32_t begin_, end_;
  std::uint32_t first_backward_ = 0;
  std::vector<trace::ValueId> id_;  // of log value v in the step
  std::vector<bool> read_later_;    // by an op after the stretch
  std::vector<bool> overwritten_;
  std::vector<Facts> facts_;  // of a storage
  std::vector<trace::ValueId> inputs_;
  std::vector<trace::Value> outputs_;
  trace::StepBuilder builder_;
};

}  // namespace

void StepLog::clear() {
  ops.clear();
  values.clear();
  operands.clear();
  shapes.clear();
}

std::uint64_t StepLog::peak(std::uint32_t begin, std::uint32_t end) const {
  std::uint64_t peak = 0;
  for (std::uint32_t i = begin; i < end; ++i) {
    std::uint64_t bytes = ops[i].live + ops[i].workspace;
    for (const std::uint32_t v : outputs(ops[i])) {
      if (values[v].overwrites == kNone && !(values[v].flags & kFilled)) bytes += values[v].bytes;
    }
    peak = std::max(peak, bytes);
  }
  return peak;
}

std::vector<std::uint32_t> StepLog::update_ends() const {
  constexpr std::uint32_t kPause = 64;  // ops between updates of one round, at most
  std::vector<std::uint32_t> ends;
  for (std::uint32_t i = 0; i < size(); ++i) {
    if ((ops[i].flags & kWritesParameter) == 0) continue;
    if (ends.empty() || i - ends.back() > kPause) ends.push_back(0);
    ends.back() = i + 1;
  }
  return ends;
}

trace::Step StepLog::cut(std::uint32_t begin, std::uint32_t end, std::uint64_t end_ticks,
                         std::uint64_t end_recorder) const {
  trace::Step step = Cut(*this, begin, end).take();
  const Op& first = ops[begin];
  const std::uint64_t took = end_ticks - first.began;
  step.seconds = seconds_of(took - std::min(took, end_recorder - first.recorder));
  return step;
}

}  // namespace memfit::engine::detail
