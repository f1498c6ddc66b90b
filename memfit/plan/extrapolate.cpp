#include "memfit/plan/extrapolate.h"

#include <algorithm>
#include <cmath>

namespace memfit::plan {
namespace {

using trace::Seconds;
using trace::Step;

bool same_structure(const Step& a, const Step& b) {
  if (a.ops.size() != b.ops.size() || a.values.size() != b.values.size() || a.operands != b.operands) return false;
  for (std::size_t i = 0; i < a.ops.size(); ++i)
    if (a.name(a.ops[i].name) != b.name(b.ops[i].name) || a.ops[i].inputs != b.ops[i].inputs || a.ops[i].outputs != b.ops[i].outputs) return false;
  for (std::size_t v = 0; v < a.values.size(); ++v)
    if (a.values[v].producer != b.values[v].producer || a.values[v].death != b.values[v].death || a.values[v].overwrites != b.values[v].overwrites)
      return false;
  return true;
}

class Line {
 public:
  Line(double x0, double x1, double x) : share_((x - x0) / (x1 - x0)) {}
  double at(double y0, double y1) const { return std::max(0.0, y0 + share_ * (y1 - y0)); }
  Bytes at(Bytes y0, Bytes y1) const {
    return Bytes(static_cast<std::uint64_t>(std::llround(at(static_cast<double>(y0.count()), static_cast<double>(y1.count())))));
  }
  Seconds at(Seconds y0, Seconds y1) const { return Seconds(at(y0.count(), y1.count())); }

 private:
  double share_;
};

}  // namespace

std::optional<std::pair<const Step*, const Step*>> find_two_batches(std::span<const Step> steps) {
  std::optional<std::pair<const Step*, const Step*>> best;
  for (const Step& a : steps)
    for (const Step& b : steps) {
      if (!a.batch || !b.batch || *a.batch >= *b.batch || !same_structure(a, b)) continue;
      if (!best || *b.batch - *a.batch > *best->second->batch - *best->first->batch) best = {&a, &b};
    }
  return best;
}

void name_batches(Step& a, Step& b) {
  if (a.values.size() != b.values.size()) return;
  for (std::size_t v = 0; v < a.values.size(); ++v) {
    const trace::Value &x = a.values[v], &y = b.values[v];
    if (x.shape == trace::kNone || y.shape == trace::kNone) continue;
    const auto &p = a.shapes[x.shape], &q = b.shapes[y.shape];
    if (p.empty() || p.size() != q.size() || p[0] == q[0] || !std::equal(p.begin() + 1, p.end(), q.begin() + 1)) continue;
    a.batch = static_cast<std::uint64_t>(p[0]);
    b.batch = static_cast<std::uint64_t>(q[0]);
    return;
  }
}

Step extrapolate(const Step& small, const Step& large, std::uint64_t batch) {
  const Line line(static_cast<double>(*small.batch), static_cast<double>(*large.batch), static_cast<double>(batch));
  Step step = small;
  step.batch = batch;
  step.fixed_bytes = line.at(small.fixed_bytes, large.fixed_bytes);
  step.seconds = line.at(small.seconds, large.seconds);
  for (std::size_t v = 0; v < step.values.size(); ++v) {
    trace::Value& value = step.values[v];
    const trace::Value &s = small.values[v], &l = large.values[v];
    value.bytes = line.at(s.bytes, l.bytes);
    value.packable = s.packable && l.packable;
    value.packed_bytes = value.packable ? line.at(s.packed_bytes, l.packed_bytes) : Bytes(0);
    value.packable = value.packable && value.packed_bytes < value.bytes;
    value.pack_seconds = static_cast<float>(line.at(s.pack_seconds, l.pack_seconds));
    value.unpack_seconds = static_cast<float>(line.at(s.unpack_seconds, l.unpack_seconds));
    value.shape = trace::kNone;  // the recorded shapes are those of another batch
  }
  step.shapes.clear();
  for (std::size_t i = 0; i < step.ops.size(); ++i) {
    step.ops[i].seconds = line.at(small.ops[i].seconds, large.ops[i].seconds);
    step.ops[i].workspace = line.at(small.ops[i].workspace, large.ops[i].workspace);
    step.ops[i].hash = 0;
  }
  return step;
}

}  // namespace memfit::plan
