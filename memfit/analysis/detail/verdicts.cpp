#include "memfit/analysis/detail/verdicts.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "memfit/core/bytes.h"

namespace memfit::analysis::detail {
namespace {

std::string size_text(std::uint64_t n) { return format_bytes(Bytes(n)); }
constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

class Judge {
 public:
  Judge(DeviceExplanation& d, const Attribution& attribution, const ExplainOptions& options)
      : d_(d), attribution_(attribution), options_(options) {}

  void run() {
    if (!d_.ooms.empty()) judge_oom(d_.ooms.back());
    else judge_fragmentation();
    judge_growth();
    judge_spike();
    if (d_.verdicts.empty()) judge_nothing();
  }

 private:
  Verdict make(VerdictKind kind, std::uint64_t bytes) {
    Verdict verdict;
    verdict.kind = kind;
    verdict.device = d_.timeline.device;
    verdict.bytes = bytes;
    return verdict;
  }
  void judge_oom(const OomState& oom);
  void judge_fragmentation();
  void judge_growth();
  void judge_spike();
  void judge_nothing();
  void say_oom(Verdict& verdict, const OomState& oom) const;
  void say_fragments(Verdict& verdict, const FreeMemory& memory) const;
  void say_owners(Verdict& verdict) const;
  void say_retries(Verdict& verdict) const;
  std::string step_of(std::uint32_t event) const;

  const ReplayProgram& program();
  void advise_settings(Verdict& verdict);
  void advise_without(Verdict& verdict, const std::vector<std::uint64_t>& places, const std::string& what);
  const ReplayResult& base_unlimited();
  bool can_replay() const { return options_.advise && d_.timeline.count > 0; }

  DeviceExplanation& d_;
  const Attribution& attribution_;
  const ExplainOptions& options_;
  std::optional<ReplayValidation> validation_;
  std::optional<ReplayResult> base_;
};

const ReplayProgram& Judge::program() {
  if (!validation_) {
    validation_ = validate_replay(d_.timeline, options_.device_memory);
    d_.replay = validation_->result;
  }
  return validation_->program;
}

/// The recorded settings on a device without end: what the settings themselves need.
const ReplayResult& Judge::base_unlimited() {
  if (!base_) base_ = predict(program(), {d_.timeline.settings, std::nullopt, options_.device_memory, nullptr});
  return *base_;
}

std::string Judge::step_of(std::uint32_t event) const {
  if (d_.steps.empty()) return "";
  const auto after = std::upper_bound(d_.steps.begin(), d_.steps.end(), event);
  if (after == d_.steps.begin()) return ", before the first step";
  return fmt::format(", in step {}", after - d_.steps.begin());
}

void Judge::say_oom(Verdict& verdict, const OomState& oom) const {
  verdict.evidence.push_back(fmt::format("event {}: asked for {}; {} allocated, {} reserved, the device had {} free",
                                         oom.event, size_text(oom.requested), size_text(oom.memory.allocated),
                                         size_text(oom.memory.reserved), size_text(oom.device_free)));
  if (d_.oom_count > 1)
    verdict.evidence.push_back(fmt::format("{} allocations ran out of memory; this is the last", d_.oom_count));
}

void Judge::say_fragments(Verdict& verdict, const FreeMemory& memory) const {
  verdict.evidence.push_back(fmt::format(
      "{} free inside segments, largest contiguous {}; {} of it in {} segments that blocks in use pin",
      size_text(memory.free_bytes), size_text(memory.largest_free), size_text(memory.stuck), memory.stuck_segments));
  std::size_t shown = 0;
  for (const Pin& pin : memory.pins) {
    if (++shown > 3) break;
    std::string when;
    if (pin.owner == kNever) when = "";
    else if ((pin.owner & kBaseFlag) != 0) when = ", allocated before the recording";
    else when = fmt::format(", allocated at event {}{}", pin.owner, step_of(pin.owner));
    verdict.evidence.push_back(fmt::format("{} are pinned by {} in use, such as a block of {} from {}{}",
                                           size_text(pin.free_bytes), size_text(pin.live_bytes),
                                           size_text(pin.block_bytes), attribution_.where(pin.stack), when));
  }
}

void Judge::say_owners(Verdict& verdict) const {
  std::vector<std::size_t> order(kCategories);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return d_.by_category[a] > d_.by_category[b]; });
  std::string text;
  for (const std::size_t k : order) {
    if (d_.by_category[k] == 0) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name_of(static_cast<Category>(k)),
                        size_text(d_.by_category[k]));
  }
  if (!text.empty()) verdict.evidence.push_back("at the peak: " + text);
}

void Judge::say_retries(Verdict& verdict) const {
  if (d_.retries > 0)
    verdict.evidence.push_back(fmt::format(
        "{} times cached memory went back to the device just before new memory was taken (allocator retries)",
        d_.retries));
}

void Judge::judge_oom(const OomState& oom) {
  const AllocatorSettings& settings = d_.timeline.settings;
  const std::uint64_t granule = oom.requested <= kSmallLimit ? kSmallSegment : settings.large_segment;
  const std::uint64_t need = settings.expandable_segments ? (oom.requested + granule - 1) / granule * granule
                                                          : settings.segment_size(oom.requested);
  const std::uint64_t in_use = oom.memory.allocated + oom.memory.pending;
  const std::uint64_t ever = std::max(oom.usable, d_.timeline.peak_reserved);  // what this process could once have
  const std::uint64_t device = options_.device_memory.value_or(0);

  if (oom.requested > std::max(ever, device)) {
    Verdict verdict = make(VerdictKind::OversizedRequest, oom.requested - std::max(ever, device));
    say_oom(verdict, oom);
    verdict.evidence.push_back(fmt::format("the request alone is larger than {}",
                                           device > ever
                                               ? fmt::format("the device's {}", size_text(device))
                                               : fmt::format("all this process could have, {}", size_text(ever))));
    verdict.evidence.push_back("asked by " + attribution_.where(d_.timeline.event(oom.event).stack));
    d_.verdicts.push_back(std::move(verdict));
    return;
  }
  if (oom.device_free >= need + 2 * kMiB) {
    Verdict verdict = make(VerdictKind::CapBelowDevice, oom.device_free);
    say_oom(verdict, oom);
    verdict.evidence.push_back(
        fmt::format("the device had room for the {} needed and was not asked: a cap stands below it "
                    "(set_per_process_memory_fraction{})",
                    size_text(need),
                    settings.memory_fraction ? fmt::format(", {} in the settings", *settings.memory_fraction) : ""));
    if (can_replay()) {
      AllocatorSettings free_of_cap = settings;
      free_of_cap.memory_fraction.reset();
      const ReplayResult result = predict(program(), {free_of_cap, oom.usable, options_.device_memory, nullptr});
      if (!result.oom)
        verdict.advice.push_back(
            {"raise per_process_memory_fraction (set_per_process_memory_fraction)", oom.device_free, false});
    }
    d_.verdicts.push_back(std::move(verdict));
    return;
  }
  // Somebody else's memory: what was once possible and is no more, or what a device of known size lacks.
  const std::uint64_t shortfall = in_use + oom.requested > oom.usable ? in_use + oom.requested - oom.usable : 0;
  const std::uint64_t gone = ever > oom.usable ? ever - oom.usable : 0;
  const std::uint64_t others = device > oom.usable ? device - oom.usable : gone;
  const bool held = others > 0 && shortfall > 0 && in_use + oom.requested <= std::max(ever, device) &&
                    others >= shortfall && others >= 64 * kMiB;
  if (held) {
    Verdict verdict = make(VerdictKind::OtherProcesses, others);
    say_oom(verdict, oom);
    if (device > oom.usable)
      verdict.evidence.push_back(
          fmt::format("of the device's {} this process could have {}: {} are held outside PyTorch's allocator",
                      size_text(device), size_text(oom.usable), size_text(others)));
    else
      verdict.evidence.push_back(fmt::format(
          "this process had {} reserved at event {}; now reserved and free together are {}: {} went to others",
          size_text(ever), d_.timeline.peak_reserved_event == kNever ? 0 : d_.timeline.peak_reserved_event,
          size_text(oom.usable), size_text(others)));
    if (can_replay()) {
      const ReplayResult result = predict(program(), {settings, oom.usable + others, options_.device_memory, nullptr});
      if (!result.oom) verdict.advice.push_back({"stop what else uses the device", others, false});
    }
    d_.verdicts.push_back(std::move(verdict));
    return;
  }
  // A few gaps exist in every full heap; they are the cause only where they are worth something.
  if (shortfall == 0 && oom.memory.stuck * 10 >= oom.usable) {
    std::uint64_t same = 0, other = 0;
    for (const auto& [pool, bytes] : oom.memory.stuck_by_pool)
      (pool == std::make_pair(oom.stream, oom.pool) ? same : other) += bytes;
    const bool divided = same + oom.device_free < oom.requested && same + other + oom.device_free >= oom.requested;
    Verdict verdict =
        make(divided ? VerdictKind::PoolsCannotShare : VerdictKind::Fragmentation, divided ? other : oom.memory.stuck);
    say_oom(verdict, oom);
    if (divided) {
      verdict.evidence.push_back(fmt::format(
          "{} lie free in {} other streams or private pools, which this request may not use; its own has {}",
          size_text(other), oom.memory.stuck_by_pool.size() - (same > 0 ? 1 : 0), size_text(same)));
      for (const auto& [pool, bytes] : oom.memory.stuck_by_pool)
        if (verdict.evidence.size() < 7 && pool != std::make_pair(oom.stream, oom.pool))
          verdict.evidence.push_back(fmt::format("stream 0x{:x}, pool ({}, {}): {} free",
                                                 d_.timeline.snapshot->streams[pool.first],
                                                 d_.timeline.snapshot->pools[pool.second].first,
                                                 d_.timeline.snapshot->pools[pool.second].second, size_text(bytes)));
    }
    say_fragments(verdict, oom.memory);
    say_retries(verdict);
    advise_settings(verdict);
    d_.verdicts.push_back(std::move(verdict));
    return;
  }
  const std::uint64_t missing = shortfall != 0           ? shortfall
                                : need > oom.device_free ? need - oom.device_free
                                                         : oom.requested;
  Verdict verdict = make(VerdictKind::Capacity, missing);
  say_oom(verdict, oom);
  if (shortfall != 0)
    verdict.evidence.push_back(
        fmt::format("{} in use and {} asked for are {} more than the {} this process could have, even without a gap",
                    size_text(in_use), size_text(oom.requested), size_text(shortfall), size_text(oom.usable)));
  else
    verdict.evidence.push_back(fmt::format(
        "{} of the {} this process could have are in use; only {} are lost in gaps, and {} more were needed",
        size_text(in_use), size_text(oom.usable), size_text(oom.memory.stuck), size_text(missing)));
  say_owners(verdict);
  say_retries(verdict);
  advise_settings(verdict);
  d_.verdicts.push_back(std::move(verdict));
}

void Judge::judge_fragmentation() {
  const FreeMemory& memory = d_.at_end;
  if (memory.stuck < 32 * kMiB || memory.stuck * 5 < memory.reserved) return;
  // Free memory that the program will fill again in the next step is no loss: count what even the peak did not use.
  const std::uint64_t used = std::max(d_.timeline.peak_allocated, memory.allocated + memory.pending);
  const std::uint64_t reserved = memory.reserved - memory.releasable;
  const std::uint64_t lost = reserved > used ? reserved - used : 0;
  if (lost < 32 * kMiB || lost * 5 < memory.reserved) return;
  std::uint64_t in_default = 0, elsewhere = 0;
  for (const auto& [pool, bytes] : memory.stuck_by_pool)
    (pool.first == 0 && pool.second == 0 ? in_default : elsewhere) += bytes;
  const bool divided = elsewhere > in_default && memory.stuck_by_pool.size() >= 3;
  Verdict verdict =
      make(divided ? VerdictKind::PoolsCannotShare : VerdictKind::Fragmentation, divided ? elsewhere : memory.stuck);
  if (divided) {
    verdict.evidence.push_back(
        fmt::format("{} lie free in {} streams or private pools that cannot use one another's memory",
                    size_text(memory.stuck), memory.stuck_by_pool.size()));
  }
  verdict.evidence.push_back(
      fmt::format("at the end {} are reserved for {} in use; at no time were more than {} in use",
                  size_text(memory.reserved), size_text(memory.allocated + memory.pending), size_text(used)));
  say_fragments(verdict, memory);
  say_retries(verdict);
  advise_settings(verdict);
  d_.verdicts.push_back(std::move(verdict));
}

void Judge::judge_growth() {
  const std::vector<Growth> growth = find_growth(d_, attribution_);
  std::uint64_t total = 0;
  for (const Growth& row : growth) total += row.bytes;
  if (total < kMiB || total * 500 < d_.timeline.peak_allocated) return;
  Verdict verdict = make(VerdictKind::Leak, total);
  std::vector<std::uint64_t> places;
  for (const Growth& row : growth) {
    places.push_back(row.place);
    if (verdict.evidence.size() < 5)
      verdict.evidence.push_back(fmt::format("{} grows in every one of {} steps, {} in all, {} blocks more",
                                             attribution_.where(row.stack), row.steps, size_text(row.bytes),
                                             row.blocks));
  }
  advise_without(verdict, places,
                 "free what " + attribution_.where(growth.front().stack) + " allocates before the next step");
  // What leaked is why it did not fit: one cause, one verdict.
  if (!d_.verdicts.empty() && d_.verdicts.front().kind == VerdictKind::Capacity && total >= d_.verdicts.front().bytes) {
    verdict.evidence.insert(verdict.evidence.end(), d_.verdicts.front().evidence.begin(),
                            d_.verdicts.front().evidence.end());
    d_.verdicts.front() = std::move(verdict);
    return;
  }
  d_.verdicts.push_back(std::move(verdict));
}

void Judge::judge_spike() {
  const std::optional<Spike> spike = find_spike(d_, attribution_);
  if (!spike) return;
  Verdict verdict = make(VerdictKind::Spike, spike->bytes);
  verdict.evidence.push_back(
      fmt::format("{} holds up to {} for at most {} events; without it the peak of {} would be {}",
                  attribution_.where(spike->stack), size_text(spike->largest), spike->longest_life,
                  size_text(d_.peak_allocated), size_text(d_.peak_allocated - spike->bytes)));
  verdict.evidence.push_back(fmt::format("{} allocations there, the largest at event {}{}", spike->times, spike->event,
                                         step_of(spike->event)));
  advise_without(verdict, {spike->place},
                 "make the temporary of " + attribution_.where(spike->stack) + " smaller, for example in pieces");
  d_.verdicts.push_back(std::move(verdict));
}

void Judge::judge_nothing() {
  Verdict verdict = make(VerdictKind::None, 0);
  verdict.evidence.push_back(
      "no allocation failed, nothing grows from step to step, and no large part of the reserved memory is stuck");
  if (d_.timeline.count == 0)
    verdict.evidence.front() =
        "the file has no history for this device; what it holds at the end shows nothing unusual";
  d_.verdicts.push_back(std::move(verdict));
}

void Judge::advise_settings(Verdict& verdict) {
  if (!can_replay()) return;
  const AllocatorSettings& now = d_.timeline.settings;
  const trace::AllocatorSnapshot& snapshot = *d_.timeline.snapshot;
  std::vector<AllocatorSettings> tries;
  const auto add = [&](auto change) {
    AllocatorSettings settings = now;
    change(settings);
    if (!(settings == now)) tries.push_back(settings);
  };
  // Versions whose snapshots do not speak of expandable segments do not have them.
  const bool knows_expandable =
      snapshot.settings.expandable_segments.has_value() ||
      std::any_of(snapshot.segments.begin(), snapshot.segments.end(), [](const auto& s) { return s.expandable; });
  if (knows_expandable && !now.expandable_segments)
    add([](AllocatorSettings& s) {
      s.expandable_segments = true;
      s.max_split_size = kNoSplitLimit;
    });
  if (!now.expandable_segments)
    for (const std::uint64_t split : {128, 512}) add([&](AllocatorSettings& s) { s.max_split_size = split * kMiB; });
  if (now.roundup_power2_divisions[10] == 0) add([](AllocatorSettings& s) { s.roundup_power2_divisions.fill(8); });
  if (now.max_split_size != kNoSplitLimit) add([](AllocatorSettings& s) { s.max_split_size = kNoSplitLimit; });
  const std::uint64_t base = base_unlimited().reserved_peak;
  std::vector<Advice> good;
  for (const AllocatorSettings& settings : tries) {
    const ReplayResult without_limit = predict(program(), {settings, std::nullopt, options_.device_memory, nullptr});
    const std::uint64_t saves = base > without_limit.reserved_peak ? base - without_limit.reserved_peak : 0;
    if (saves < 2 * kMiB || saves * 100 < base) continue;
    if (!d_.ooms.empty()) {
      const ReplayResult limited =
          predict(program(), {settings, d_.ooms.back().usable, options_.device_memory, nullptr});
      if (limited.oom) continue;
    }
    good.push_back({conf_text(settings), saves, true});
  }
  std::stable_sort(good.begin(), good.end(), [](const Advice& a, const Advice& b) { return a.saves > b.saves; });
  if (good.size() > 2) good.resize(2);
  verdict.advice.insert(verdict.advice.end(), good.begin(), good.end());
}

void Judge::advise_without(Verdict& verdict, const std::vector<std::uint64_t>& places, const std::string& what) {
  if (!can_replay()) return;
  const trace::AllocatorSnapshot& snapshot = *d_.timeline.snapshot;
  std::vector<bool> skip(snapshot.stack_begin.size(), false);
  for (trace::StackId stack = 0; stack + 1 < snapshot.stack_begin.size(); ++stack)
    skip[stack] = std::find(places.begin(), places.end(), attribution_.place_key(stack)) != places.end();
  const ReplayResult result = predict(program(), {d_.timeline.settings, std::nullopt, options_.device_memory, &skip});
  const std::uint64_t base = base_unlimited().reserved_peak;
  if (result.reserved_peak < base) verdict.advice.push_back({what, base - result.reserved_peak, false});
}

}  // namespace

void judge(DeviceExplanation& device, const Attribution& attribution, const ExplainOptions& options) {
  Judge(device, attribution, options).run();
}

}  // namespace memfit::analysis::detail
