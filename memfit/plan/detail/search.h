// Finds a cheap schedule under the limit: greedy, cleaning, then ruin and recreate with exact incremental costs.
// Private to plan/. Threads: one. Deterministic: effort is counted in work units, not in seconds.
// The method and why: docs/design/planning.md.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "memfit/plan/detail/problem.h"
#include "memfit/plan/detail/schedule.h"

namespace memfit::plan::detail {

struct OffloadChannels {
  double write_seconds_per_byte = 0, read_seconds_per_byte = 0, latency = 0;
  std::int64_t room = 0;  // bytes
};

struct SearchOptions {
  double effort = 1.0;
  std::uint64_t seed = 1;
  bool recompute = true;
  bool pack = true;
  std::optional<OffloadChannels> offload;
  std::int64_t most_work = std::int64_t{1} << 62;
};

class Search {
 public:
  Search(const Problem& problem, Schedule& schedule, const SearchOptions& options);

  /// Bring the schedule under its limit, cheaply. False: did not succeed; the schedule is then the least violating found.
  bool run();

 private:
  struct Move {
    std::int32_t gap = -1;
    std::vector<Absence> list;  // of the value within the gap
    double cost = 0;            // change
    std::int64_t violation = 0; // change
  };
  /// Gaps that begin about at `a` or end about at `b`.
  struct Near {
    std::int32_t a = 0, b = 0, reach = 1 << 30;
  };
  struct Weighting {
    double power = 1.0;  // weight of a stage = (bytes above the limit)^power
    double noise = 0.0;
    std::int32_t tries = 6;  // how many of the most promising gaps are probed exactly
  };
  using Solution = Schedule::Changes;
  /// While it lives, no more work than `work` from now on, nor more than was allowed before.
  class WorkLimit {
   public:
    WorkLimit(Search& search, std::int64_t work) : search_(search), outer_(search.work_until_) {
      search_.work_until_ = std::min(outer_, search_.s_.work + work);
    }
    ~WorkLimit() { search_.work_until_ = outer_; }
    WorkLimit(const WorkLimit&) = delete;
    WorkLimit& operator=(const WorkLimit&) = delete;

   private:
    Search& search_;
    const std::int64_t outer_;
  };

  /// A stay outside for the whole gap whose copies hide behind ops, if both channels have time for it.
  std::optional<Absence> offload(std::int32_t gap) const;
  double free_write(std::int32_t except, double from, double length) const;
  double free_read(std::int32_t except, double until, double length) const;
  void offload_around();
  void offload_the_dear();
  void note_outside(std::int32_t gap);
  bool repair(const Weighting& weighting);
  void repair_in_batches();
  bool repair_in_stretches();
  bool drop_stretches(std::int32_t count);
  Schedule::Changes stretch(std::int32_t from, std::int32_t to, std::span<const std::int32_t> gaps) const;
  void begin_short();
  void begin_long();
  void clean(bool thorough, const Near& near);
  void improve(std::int64_t budget);
  bool ruin_and_recreate(double temperature);
  Near ruin();
  std::int32_t dear_pass();

  std::vector<std::vector<Absence>> variants(std::int32_t gap) const;
  std::vector<Absence> compose(std::int32_t gap, const std::vector<Absence>& list) const;
  std::vector<Absence> inside(std::int32_t gap) const;
  bool touched(std::int32_t gap) const;  // whether the value is away anywhere inside it
  bool holds_stay(std::int32_t gap) const;
  bool probe(Move& move);
  bool apply(const Move& move) { return s_.assign(p_.gaps[move.gap].value, compose(move.gap, move.list)); }
  void shortlist(const Weighting& weighting, std::vector<std::int32_t>& gaps);
  void shortlist_passes(std::vector<std::int32_t>& gaps);
  bool fits_again(std::int32_t value, const std::vector<Absence>& list) const;
  Solution save() const;
  void load(const Solution& solution);
  double uniform() { return std::uniform_real_distribution<double>(0, 1)(random_); }
  std::int32_t pick(std::size_t size) { return static_cast<std::int32_t>(random_() % size); }

  const Problem& p_;
  Schedule& s_;
  SearchOptions options_;
  std::int64_t work_until_;  // Schedule::work at which what is being tried ends
  std::mt19937_64 random_;
  std::vector<float> estimate_;                 // per gap: what dropping it cost when last probed
  std::vector<std::uint8_t> usable_;            // per gap: can be away at all
  std::vector<std::uint32_t> tabu_;             // per gap: not before this iteration
  std::vector<std::int32_t> first_gap_;         // per value
  std::vector<double> weight_;                  // prefix sums over stages
  std::uint32_t iteration_ = 0;
  // Values that are, or once were, outside: the channels look only at these. Room is given back never: a search that tried
  // something outside may end with less there than allowed, not with more.
  std::vector<std::int32_t> outside_;
  std::vector<std::uint8_t> written_;           // per value: its stay across the boundary needs a write
  std::int64_t room_left_ = 0;
};

}  // namespace memfit::plan::detail
