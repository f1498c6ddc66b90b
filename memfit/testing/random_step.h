// Random recorded steps that keep all rules of trace/step.h, for property tests.
// Not here: steps that look like training (tests/plan/models.py).
// Threads: any. Cost: linear.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "memfit/trace/step.h"

namespace memfit::testing {

/// A random step that keeps all rules.
inline trace::Step random_step(std::mt19937& random, int ops) {
  using namespace trace;
  StepBuilder b;
  auto upto = [&](std::uint64_t n) { return static_cast<std::uint32_t>(random() % n); };
  std::vector<ValueId> held;
  std::uint32_t storage = 0;
  auto fresh = [&] {
    Value v;
    v.bytes = Bytes(upto(1u << 30));
    v.storage = storage++;
    v.category = static_cast<Category>(upto(kCategoryCount));
    v.needed_after = upto(4) > 0;
    v.pinned = upto(8) == 0;
    if (upto(3) == 0) v.shape = b.intern_shape(std::vector<std::int64_t>{static_cast<std::int64_t>(upto(5)), 3});
    if (upto(5) == 0 && v.bytes > Bytes(1)) {
      v.packable = true;
      v.packed_bytes = Bytes(v.bytes.count() / 2);
      v.pack_seconds = 0.25f;
    }
    return v;
  };
  for (int i = 0; i < 3; ++i) held.push_back(b.add_source(fresh()));
  for (int i = 0; i < ops; ++i) {
    Op op;
    op.hash = random();
    op.name = b.intern("op" + std::to_string(upto(7)));
    if (upto(2)) op.source_line = b.intern("train.py:" + std::to_string(upto(9)));
    op.seconds = Seconds(upto(1000) / 1e5);
    op.workspace = Bytes(upto(5000));
    op.replay = static_cast<Replay>(upto(kReplayCount));
    std::vector<ValueId> inputs;
    for (std::uint32_t k = upto(4); k > 0 && !held.empty(); --k) inputs.push_back(held[upto(held.size())]);
    std::vector<Value> outputs;
    for (std::uint32_t k = upto(3); k > 0; --k) outputs.push_back(fresh());
    if (!inputs.empty() && upto(4) == 0) {  // write in place
      const Value old = b.value(inputs[0]);
      Value v = fresh();
      v.overwrites = inputs[0];
      v.storage = old.storage;
      v.bytes = old.bytes;
      v.packable = false;
      v.packed_bytes = Bytes(0);
      v.pack_seconds = 0;
      outputs.push_back(v);
      std::erase(held, inputs[0]);
    }
    ValueId first = 0;
    b.add_op(op, inputs, outputs, &first);
    for (std::size_t k = 0; k < outputs.size(); ++k) held.push_back(first + static_cast<ValueId>(k));
    if (!held.empty() && upto(2)) {
      const ValueId gone = held[upto(held.size())];
      b.drop(gone);
      std::erase(held, gone);
    }
  }
  b.step().fixed_bytes = Bytes(upto(1u << 31));
  b.step().seconds = Seconds(1.5);
  if (upto(2)) b.step().batch = upto(1000);
  return b.take();
}

}  // namespace memfit::testing
