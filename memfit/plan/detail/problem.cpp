#include "memfit/plan/detail/problem.h"

#include <algorithm>

namespace memfit::plan::detail {
namespace {

using trace::kNone;

void fill_values(const trace::Step& step, Problem& p) {
  for (const trace::Value& v : step.values) {
    p.bytes.push_back(static_cast<std::int64_t>(v.bytes.count()));
    p.packed.push_back(v.packable ? std::max<std::int64_t>(1, static_cast<std::int64_t>(v.packed_bytes.count())) : 0);
    p.pack_cost.push_back(v.pack_seconds);
    p.unpack_cost.push_back(v.unpack_seconds);
    p.producer.push_back(v.producer == kNone ? -1 : static_cast<std::int32_t>(v.producer));
    p.birth.push_back(p.producer.back());
    p.death.push_back(v.death == kNone ? p.n : static_cast<std::int32_t>(v.death));
    p.overwrites.push_back(v.overwrites == kNone ? -1 : static_cast<std::int32_t>(v.overwrites));
    p.movable.push_back(!v.pinned && v.bytes.count() > 0);
  }
}

void fill_ops(const trace::Step& step, Problem& p) {
  double sum = 0;
  for (const trace::Op& op : step.ops) sum += op.seconds.count();
  const double stretch = sum > 0 ? std::max(1.0, step.seconds.count() / sum) : 1.0;
  double clock = 0;
  for (const trace::Op& op : step.ops) {
    p.cost.push_back(op.seconds.count());
    p.workspace.push_back(static_cast<std::int64_t>(op.workspace.count()));
    p.replayable.push_back(op.replay == trace::Replay::Yes);
    for (trace::ValueId v : step.inputs(op)) p.inputs.items.push_back(static_cast<std::int32_t>(v));
    p.inputs.offsets.push_back(static_cast<std::uint32_t>(p.inputs.items.size()));
    for (trace::ValueId v : step.outputs(op)) p.outputs.items.push_back(static_cast<std::int32_t>(v));
    p.outputs.offsets.push_back(static_cast<std::uint32_t>(p.outputs.items.size()));
    p.start.push_back(clock);
    clock += op.seconds.count() * stretch;
  }
  p.start.push_back(clock);
}

void fill_uses(const trace::Step& step, Problem& p) {
  std::vector<std::uint32_t> count(static_cast<std::size_t>(p.m) + 1, 0);
  auto needed_at_end = [&](std::int32_t v) { return step.values[v].death == kNone && step.values[v].needed_after; };
  for (std::int32_t v : p.inputs.items) ++count[v];
  for (std::int32_t v = 0; v < p.m; ++v) count[v] += needed_at_end(v);
  p.uses.offsets.resize(static_cast<std::size_t>(p.m) + 1);
  for (std::int32_t v = 0; v < p.m; ++v) p.uses.offsets[v + 1] = p.uses.offsets[v] + count[v];
  p.uses.items.resize(p.uses.offsets[p.m]);
  std::vector<std::uint32_t> at(p.uses.offsets.begin(), p.uses.offsets.end() - 1);
  for (std::int32_t op = 0; op < p.n; ++op)
    for (std::int32_t v : p.inputs[op]) p.uses.items[at[v]++] = op;
  for (std::int32_t v = 0; v < p.m; ++v)
    if (needed_at_end(v)) p.uses.items[at[v]++] = p.n;
}

void fill_profile(const trace::Step& step, Problem& p) {
  std::vector<std::int64_t> change(static_cast<std::size_t>(p.n) + 2, 0);
  for (std::int32_t v = 0; v < p.m; ++v) {
    change[p.birth[v] + 1] += p.bytes[v];
    change[p.death[v] + 1] -= p.bytes[v];
  }
  std::int64_t live = static_cast<std::int64_t>(step.fixed_bytes.count());
  for (std::int32_t t = 0; t <= p.n; ++t) {
    live += change[t];
    p.base.push_back(live);
    std::int64_t fresh = 0;
    if (t < p.n) {
      fresh = p.workspace[t];
      for (std::int32_t v : p.outputs[t])
        if (p.overwrites[v] < 0) fresh += p.bytes[v];
    }
    p.added.push_back(fresh);
  }
}

void fill_gaps(Problem& p) {
  for (std::int32_t v = 0; v < p.m; ++v) {
    if (!p.movable[v]) continue;
    std::int32_t last = p.birth[v];
    for (std::int32_t use : p.uses[v]) {
      if (use - last > 1) p.gaps.push_back({v, last, use});
      last = use;
    }
    if (last < p.death[v]) p.gaps.push_back({v, last, p.n + 1});
  }
}

}  // namespace

Problem make_problem(const trace::Step& step) {
  Problem p;
  p.n = static_cast<std::int32_t>(step.ops.size());
  p.m = static_cast<std::int32_t>(step.values.size());
  fill_values(step, p);
  fill_ops(step, p);
  fill_uses(step, p);
  fill_profile(step, p);
  fill_gaps(p);
  return p;
}

}  // namespace memfit::plan::detail
