#include "memfit/engine/session.h"

#include "memfit/engine/engine.h"

namespace memfit::engine {

Session::Session(const SessionOptions& options) {
  Engine& engine = Engine::instance();
  engine.start(options.door, options.verify, nullptr);
  engine.set_planning(options.plan);
  if (!options.offload.empty()) engine.set_offload(options.offload, options.offload_limit);
  old_limit_ = Bytes(engine.set_limit(options.tensor_memory.count()));
  covered_before_ = cover_thread(true);
}

Session::~Session() {
  Engine& engine = Engine::instance();
  engine.set_limit(old_limit_.count());
  engine.close_offload();
  // Evicted tensors come back when they are used, so ops stay watched.
  if (!covered_before_ && !engine.has_evicted()) cover_thread(false);
}

Bytes Session::set_tensor_memory(Bytes limit) { return Bytes(Engine::instance().set_limit(limit.count())); }

SessionStats Session::stats() const {
  const Engine& engine = Engine::instance();
  const EngineStats s = engine.stats();
  const memory::Ledger ledger = memory::CpuAllocator::instance().ledger();
  SessionStats out;
  out.limit = Bytes(memory::CpuAllocator::instance().limit());
  out.live = Bytes(ledger.live);
  out.cached = Bytes(ledger.cached);
  out.peak = Bytes(ledger.peak);
  out.unlimited_peak = Bytes(ledger.peak_program);
  out.ops = engine.ops();
  out.evictions = s.evictions;
  out.recomputed_ops = s.recomputed_ops;
  out.planned_steps = s.planned_steps;
  out.replanned = s.replanned;
  out.packed = s.packed;
  out.offload_written = Bytes(s.offload_write_bytes);
  out.offload_read = Bytes(s.offload_read_bytes);
  out.recompute_seconds = static_cast<double>(s.recompute_ns) * 1e-9;
  out.search_seconds = static_cast<double>(s.search_ns) * 1e-9;
  return out;
}

void Session::cover_this_thread() { cover_thread(true); }

}  // namespace memfit::engine
