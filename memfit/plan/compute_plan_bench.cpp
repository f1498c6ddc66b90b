// Planning time and memory for steps of about 1,000, 10,000 and 100,000 ops at half of their peak, with the growth rate.
#include <benchmark/benchmark.h>
#include <malloc.h>

#include <fstream>
#include <string>

#include "memfit/plan/compute_plan.h"

namespace memfit::plan {
namespace {

using trace::Category;
using trace::Op;
using trace::Seconds;
using trace::Step;
using trace::StepBuilder;
using trace::Value;
using trace::ValueId;

/// A transformer's training step in outline: 18 ops forward and 30 backward a block, sizes and times as measured on a CPU.
class Transformer {
 public:
  Step make(int blocks) {
    ValueId x = op("embedding", {}, 2, 0.26);
    for (int b = 0; b < blocks; ++b) x = block(x);
    ValueId g = op("loss", {x}, 2, 0.3);
    for (auto it = tape_.rbegin(); it != tape_.rend(); ++it) {
      std::vector<ValueId> in{g};
      in.insert(in.end(), it->begin(), it->end());
      const ValueId next = op("backward", in, 2, 0.9);
      op("grad_weight", in, 0.25, 0.4);
      builder_.drop(g);
      for (ValueId v : *it)
        if (--uses_[v] == 0) builder_.drop(v);
      g = next;
    }
    builder_.step().seconds = total_;
    return builder_.take();
  }

 private:
  ValueId op(const char* name, std::vector<ValueId> in, double mib, double ms) {
    Op o;
    o.name = builder_.intern(name);
    o.seconds = Seconds(ms / 1e3);
    total_ += o.seconds;
    Value v;
    v.bytes = Bytes(static_cast<std::uint64_t>(mib * (1 << 20)));
    v.storage = storage_++;
    ValueId first = 0;
    builder_.add_op(o, in, std::vector<Value>{v}, &first);
    uses_.resize(first + 1, 0);
    return first;
  }

  /// Run an op whose backward reads `saved` and, if `output`, its result.
  ValueId saved_op(const char* name, std::vector<ValueId> in, std::vector<ValueId> saved, bool output, double mib, double ms) {
    const ValueId out = op(name, std::move(in), mib, ms);
    if (output) saved.push_back(out);
    for (ValueId v : saved) ++uses_[v];
    tape_.push_back(std::move(saved));
    return out;
  }

  void done(ValueId v) {
    if (uses_[v] == 0) builder_.drop(v);
  }

  ValueId block(ValueId x) {
    const ValueId h = saved_op("layer_norm", {x}, {x}, false, 2, 0.2);
    ValueId qkv[3];
    for (ValueId& v : qkv) v = saved_op("linear", {h}, {h}, false, 2, 0.9);
    const ValueId a = saved_op("attention", {qkv[0], qkv[1], qkv[2]}, {qkv[0], qkv[1], qkv[2]}, true, 2, 2.6);
    const ValueId o = saved_op("linear", {a}, {a}, false, 2, 0.9);
    const ValueId y = saved_op("add", {x, o}, {}, false, 2, 0.16);
    done(o);
    const ValueId h2 = saved_op("layer_norm", {y}, {y}, false, 2, 0.2);
    const ValueId up = saved_op("linear", {h2}, {h2}, false, 8, 3.6);
    const ValueId act = saved_op("gelu", {up}, {up}, false, 8, 0.8);
    const ValueId down = saved_op("linear", {act}, {act}, false, 2, 0.9);
    const ValueId z = saved_op("add", {y, down}, {}, false, 2, 0.16);
    done(down);
    return z;
  }

  StepBuilder builder_;
  std::vector<std::vector<ValueId>> tape_;
  std::vector<std::uint32_t> uses_;
  std::uint32_t storage_ = 0;
  Seconds total_{0};
};

/// Highest resident bytes of this process since the last call with `reset`.
double peak_rss_mib(bool reset) {
  if (reset) {
    ::malloc_trim(0);
    std::ofstream("/proc/self/clear_refs") << "5";
    return 0;
  }
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024;
  return 0;
}

void BM_ComputePlan(benchmark::State& state) {
  const Step step = Transformer().make(static_cast<int>(state.range(0)));
  PlanOptions options;
  options.limit = Bytes(trace::peak_bytes(step).count() / 2);
  peak_rss_mib(true);
  Plan plan;
  for (auto _ : state) benchmark::DoNotOptimize(plan = compute_plan(step, options));
  state.counters["ops"] = static_cast<double>(step.ops.size());
  state.counters["peak_rss_mib"] = peak_rss_mib(false);
  state.counters["recompute_percent"] = 100 * plan.recompute.count() / step.seconds.count();
  state.SetComplexityN(static_cast<std::int64_t>(step.ops.size()));
}
// 36 ops a block.
BENCHMARK(BM_ComputePlan)->Arg(28)->Arg(278)->Arg(2778)->Iterations(1)->Unit(benchmark::kMillisecond)->MeasureProcessCPUTime()->Complexity();

}  // namespace
}  // namespace memfit::plan

BENCHMARK_MAIN();
