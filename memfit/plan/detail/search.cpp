#include "memfit/plan/detail/search.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace memfit::plan::detail {
namespace {

constexpr double kTiny = 1e-12;
constexpr std::int32_t kLongStep = 20000;  // ops
constexpr std::int64_t kCleanWork = 200'000'000;
constexpr std::int64_t kLongWork = 400'000'000;  // a second or two

}  // namespace

Search::Search(const Problem& problem, Schedule& schedule, const SearchOptions& options)
    : p_(problem), s_(schedule), options_(options), work_until_(options.most_work), random_(options.seed), tabu_(problem.gaps.size(), 0),
      first_gap_(static_cast<std::size_t>(problem.m) + 1, 0), weight_(static_cast<std::size_t>(problem.n) + 3, 0.0) {
  if (options_.offload) room_left_ = options_.offload->room;
  written_.assign(p_.m, 0);
  std::size_t g = 0;
  for (std::int32_t v = 0; v <= p_.m; ++v) {
    while (g < p_.gaps.size() && p_.gaps[g].value < v) ++g;
    first_gap_[v] = static_cast<std::int32_t>(g);
  }
  for (const Gap& gap : p_.gaps) {
    const std::int32_t op = p_.producer[gap.value];
    double cost = gap.b > p_.n ? 0.0 : op >= 0 ? p_.cost[op] : 0.0;
    if (p_.packed[gap.value]) cost = std::min(cost, static_cast<double>(p_.pack_cost[gap.value]) + p_.unpack_cost[gap.value]);
    estimate_.push_back(static_cast<float>(cost));
    const bool comes_back = options_.recompute && op >= 0 && (gap.b > p_.n || p_.replayable[op]);
    const bool packs = options_.pack && p_.packed[gap.value] && gap.b <= p_.n;
    usable_.push_back(comes_back || packs || (options_.offload && gap.a >= 0 && gap.b <= p_.n));
  }
}

std::vector<Absence> Search::inside(std::int32_t gap) const {
  const Gap& g = p_.gaps[gap];
  std::vector<Absence> list;
  for (const Absence& x : s_.absences(g.value))
    if (x.a >= g.a && x.b <= g.b) list.push_back(x);
  return list;
}

bool Search::touched(std::int32_t gap) const {
  const Gap& g = p_.gaps[gap];
  if (holds_stay(gap)) return false;
  for (const Absence& x : s_.absences(g.value))
    if (x.a >= g.a && x.b <= g.b) return true;
  return false;
}

/// One half of a stay outside over the end of the step: without the other half it may not go.
bool Search::holds_stay(std::int32_t gap) const {
  const Gap& g = p_.gaps[gap];
  for (const Absence& x : s_.absences(g.value))
    if (x.mode == Mode::Offload && (x.a < 0 || x.b > p_.n) && x.a >= g.a && x.b <= g.b) return true;
  return false;
}

std::vector<Absence> Search::compose(std::int32_t gap, const std::vector<Absence>& list) const {
  const Gap& g = p_.gaps[gap];
  std::vector<Absence> all;
  bool placed = false;
  for (const Absence& x : s_.absences(g.value)) {
    if (x.a >= g.a && x.b <= g.b) continue;
    if (!placed && x.a >= g.b) {
      all.insert(all.end(), list.begin(), list.end());
      placed = true;
    }
    all.push_back(x);
  }
  if (!placed) all.insert(all.end(), list.begin(), list.end());
  return all;
}

/// Ways to fill the gap other than the present one. Besides "away all the time" and "there all the time", the moments
/// at which a pass reads or makes the value are worth being there for.
std::vector<std::vector<Absence>> Search::variants(std::int32_t gap) const {
  const Gap& g = p_.gaps[gap];
  const std::int32_t v = g.value;
  std::vector<std::vector<Absence>> out;
  if (holds_stay(gap)) return out;
  const std::vector<Absence> now = inside(gap);
  auto offer = [&](std::vector<Absence> list) {
    if (list != now && std::find(out.begin(), out.end(), list) == out.end()) out.push_back(std::move(list));
  };
  const std::int32_t op = p_.producer[v];
  if (options_.pack && p_.packed[v] && g.b <= p_.n && g.b - g.a > 1) offer({Schedule::pack(g.a, g.b)});
  if (options_.offload)
    if (auto away = offload(gap)) offer({*away});
  const bool forever = g.b > p_.n;
  if (forever ? !(options_.recompute || op < 0) : !(options_.recompute && op >= 0 && p_.replayable[op])) {
    offer({});
    return out;
  }
  if (op < 0) return out;
  offer({Schedule::recompute(g.a, g.b)});
  offer({});
  std::int32_t first = g.b, last = g.a;
  auto look = [&](std::span<const std::int32_t> stages) {
    for (std::int32_t t : stages)
      if (t > g.a && t < g.b) {
        first = std::min(first, t);
        last = std::max(last, t);
      }
  };
  look(s_.readers(v));
  look(s_.makers(v));
  if (!forever) {  // back a little early: where there is room for the pass, or with the next one before
    if (g.b - g.a > 2) offer({Schedule::recompute(g.a, g.b - 1)});
    for (std::int32_t t = g.b - 2; t > std::max(g.a + 1, g.b - 12); --t)
      if (!s_.pass(t).ops.empty()) {
        offer({Schedule::recompute(g.a, t)});
        break;
      }
  }
  if (first >= g.b) return out;
  offer({Schedule::recompute(g.a, first)});
  if (last < g.b - 1 || forever) offer({Schedule::recompute(last, g.b)});
  if (first < g.b - 1 || forever) offer({Schedule::recompute(g.a, first), Schedule::recompute(first, g.b)});
  if (last != first) {
    offer({Schedule::recompute(g.a, last)});
    offer({Schedule::recompute(g.a, last), Schedule::recompute(last, g.b)});
    offer({Schedule::recompute(g.a, first), Schedule::recompute(last, g.b)});
  }
  return out;
}

bool Search::probe(Move& move) {
  const std::size_t mark = s_.mark();
  const double cost = s_.cost();
  const std::int64_t violation = s_.violation();
  if (!apply(move)) return false;
  move.cost = s_.cost() - cost;
  move.violation = s_.violation() - violation;
  s_.rollback(mark);
  return true;
}

/// The gaps that promise most relief of over-full stages per second, by their last known cost.
void Search::shortlist(const Weighting& weighting, std::vector<std::int32_t>& gaps) {
  const auto profile = s_.profile();
  weight_[0] = 0;
  for (std::int32_t t = 0; t <= p_.n; ++t) {
    const auto over = static_cast<double>(profile[t] - s_.limit());
    weight_[t + 1] = weight_[t] + (over <= 0 ? 0.0 : weighting.power == 1.0 ? over : weighting.power == 0.0 ? 1.0 : std::pow(over, weighting.power));
  }
  std::vector<std::pair<double, std::int32_t>> best;
  const auto count = static_cast<std::int32_t>(p_.gaps.size());
  for (std::int32_t g = 0; g < count; ++g) {
    const Gap& gap = p_.gaps[g];
    const double relief = weight_[std::min({gap.b, p_.death[gap.value] + 1, p_.n + 1})] - weight_[gap.a + 1];
    if (relief <= 0 || tabu_[g] > iteration_ || !usable_[g]) continue;
    const auto& list = s_.absences(gap.value);
    bool away = false;
    for (const Absence& x : list) away |= x.a == gap.a && x.b == gap.b;
    if (away) continue;
    double score = (estimate_[g] + 1e-9) / (relief * static_cast<double>(p_.bytes[gap.value]));
    if (weighting.noise > 0) score *= 1.0 + weighting.noise * uniform();
    if (best.size() < static_cast<std::size_t>(weighting.tries)) {
      best.emplace_back(score, g);
      std::push_heap(best.begin(), best.end());
    } else if (score < best.front().first) {
      std::pop_heap(best.begin(), best.end());
      best.back() = {score, g};
      std::push_heap(best.begin(), best.end());
    }
  }
  s_.work += count / 2 + p_.n / 4;
  std::sort(best.begin(), best.end());
  gaps.clear();
  for (auto& [score, g] : best) gaps.push_back(g);
}

/// Where a pass itself is what does not fit: gaps whose change makes that pass shorter or later.
void Search::shortlist_passes(std::vector<std::int32_t>& gaps) {
  const auto profile = s_.profile();
  const auto worst = static_cast<std::int32_t>(std::max_element(profile.begin(), profile.end()) - profile.begin());
  const Pass& pass = s_.pass(worst);
  auto offer = [&](std::int32_t v) {
    for (std::int32_t g = first_gap_[v]; g < first_gap_[v + 1]; ++g)
      if (p_.gaps[g].a < worst && worst <= p_.gaps[g].b && std::find(gaps.begin(), gaps.end(), g) == gaps.end()) gaps.push_back(g);
  };
  for (std::int32_t v : pass.makes) offer(v);
  for (std::int32_t v : pass.due) offer(v);
  for (std::int32_t v : pass.reads) offer(v);
  if (gaps.size() > 40) gaps.resize(40);
}

bool Search::repair(const Weighting& weighting) {
  std::vector<std::int32_t> gaps;
  const std::size_t most_rounds = 100 + 8 * p_.gaps.size();
  for (std::size_t round = 0; !s_.feasible(); ++round) {
    if (round > most_rounds || s_.work > work_until_) return false;
    Move best;
    double best_score = 0;
    auto consider = [&](std::int32_t g) {
      bool helps = false;
      for (auto& list : variants(g)) {
        Move move{g, std::move(list), 0, 0};
        if (!probe(move)) continue;
        const Gap& gap = p_.gaps[g];
        if (move.list.size() == 1 && move.list[0].a == gap.a && move.list[0].b == gap.b) estimate_[g] = static_cast<float>(std::max(0.0, move.cost));
        if (move.violation >= 0) continue;
        helps = true;
        const double score = (move.cost + 1e-9) / -static_cast<double>(move.violation) * (1.0 + weighting.noise * uniform());
        if (best.gap < 0 || score < best_score) {
          best_score = score;
          best = std::move(move);
        }
      }
      if (!helps) estimate_[g] = estimate_[g] * 4 + 1e-4f;  // make room on the shortlist for others
    };
    shortlist(weighting, gaps);
    for (std::int32_t g : gaps) consider(g);
    if (best.gap < 0 || best_score > 0) {
      gaps.clear();
      shortlist_passes(gaps);
      for (std::int32_t g : gaps) consider(g);
    }
    if (best.gap < 0) {
      Weighting wider = weighting;
      wider.tries = static_cast<std::int32_t>(std::min<std::size_t>(p_.gaps.size(), 200));
      shortlist(wider, gaps);
      for (std::int32_t g : gaps) consider(g);
    }
    if (best.gap < 0 || !apply(best)) return false;
    if (!best.list.empty() && best.list[0].mode == Mode::Offload) note_outside(best.gap);
  }
  return true;
}

/// For long steps: take many of the most promising gaps before looking at the profile again.
void Search::repair_in_batches() {
  std::vector<std::int32_t> gaps;
  const auto batch = static_cast<std::int32_t>(p_.gaps.size() / 800);
  for (int round = 0; round < 3000 && !s_.feasible() && s_.work <= work_until_; ++round) {
    Weighting weighting;
    weighting.tries = batch;
    shortlist(weighting, gaps);
    if (gaps.empty()) return;
    const std::int64_t before = s_.violation();
    double best_score = -1;
    std::size_t taken = 0;
    for (std::int32_t g : gaps) {
      const Gap& gap = p_.gaps[g];
      const std::size_t mark = s_.mark();
      const double cost = s_.cost();
      const std::int64_t violation = s_.violation();
      Move move{g, {}, 0, 0};
      const bool pack = options_.pack && p_.packed[gap.value] && gap.b <= p_.n;
      move.list = {pack ? Schedule::pack(gap.a, gap.b) : Schedule::recompute(gap.a, gap.b)};
      const bool done = apply(move);
      const std::int64_t relief = done ? violation - s_.violation() : 0;
      if (relief <= 0) {
        s_.rollback(mark);
        estimate_[g] = estimate_[g] * 4 + 1e-4f;
        continue;
      }
      estimate_[g] = static_cast<float>(std::max(0.0, s_.cost() - cost));
      const double score = (s_.cost() - cost + 1e-9) / static_cast<double>(relief);
      if (best_score < 0 || score < best_score) best_score = score;
      if (score > 1.5 * best_score) {
        s_.rollback(mark);
        continue;
      }
      ++taken;
      if (s_.feasible()) return;
    }
    s_.forget_history();
    if (!taken && s_.violation() >= before) return;
  }
}

/// What ops from .. to-1 made and used for the last time before a long gap: away together, and back together. What is
/// wanted again sooner than most of it stays.
Schedule::Changes Search::stretch(std::int32_t from, std::int32_t to, std::span<const std::int32_t> gaps) const {
  auto outlasts = [&](const Gap& gap) {
    return p_.producer[gap.value] >= from && gap.a < to && gap.b > to && gap.b <= p_.n && s_.absences(gap.value).empty();
  };
  std::vector<std::pair<std::int32_t, std::int32_t>> ends;  // when, which
  for (std::int32_t g : gaps)
    if (outlasts(p_.gaps[g])) ends.emplace_back(p_.gaps[g].b, g);
  std::sort(ends.rbegin(), ends.rend());
  double bytes = 0, most = 0;
  std::int32_t back = p_.n + 1;
  for (const auto& [b, g] : ends) {
    bytes += static_cast<double>(p_.bytes[p_.gaps[g].value]);
    const double relief = bytes * (p_.start[b] - p_.start[to]);
    if (relief > most) {
      most = relief;
      back = b;
    }
  }
  Schedule::Changes changes;
  for (std::int32_t g : gaps) {  // in the order of values
    const Gap& gap = p_.gaps[g];
    if (!outlasts(gap) || gap.b < back || (!changes.empty() && changes.back().first == gap.value)) continue;
    changes.emplace_back(gap.value, std::vector<Absence>{Schedule::recompute(gap.a, back)});
  }
  return changes;
}

/// The forward ops cut into `count` stretches of equal time; the cheapest per byte go, until it fits.
bool Search::drop_stretches(std::int32_t count) {
  std::vector<std::int32_t> cuts{0};
  for (std::int32_t k = 1; k < count; ++k) {
    const double at = p_.start[p_.n] * k / count;
    cuts.push_back(static_cast<std::int32_t>(std::lower_bound(p_.start.begin(), p_.start.end(), at) - p_.start.begin()));
  }
  cuts.push_back(p_.n);
  std::vector<std::vector<std::int32_t>> gaps(count);
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(p_.gaps.size()); ++g) {
    const std::int32_t op = p_.producer[p_.gaps[g].value];
    if (op < 0 || !usable_[g] || !p_.replayable[op]) continue;
    gaps[std::upper_bound(cuts.begin(), cuts.end(), op) - cuts.begin() - 1].push_back(g);
  }
  // Scores grow while others go (a pass has more to make), so an old one is a lower bound: only the best are tried again.
  std::vector<std::pair<double, std::int32_t>> order;
  for (std::int32_t k = 0; k < count; ++k)
    if (!gaps[k].empty()) order.emplace_back(0.0, k);
  while (!s_.feasible() && !order.empty() && s_.work <= work_until_) {
    std::pop_heap(order.begin(), order.end(), std::greater<>());
    const auto [old_score, k] = order.back();
    order.pop_back();
    const std::size_t mark = s_.mark();
    const double cost = s_.cost();
    const std::int64_t violation = s_.violation();
    auto changes = stretch(cuts[k], cuts[k + 1], gaps[k]);
    if (changes.empty() || !s_.assign_all(std::move(changes))) continue;
    const std::int64_t relief = violation - s_.violation();
    if (relief <= 0) {
      s_.rollback(mark);
      continue;
    }
    const double score = (s_.cost() - cost + 1e-9) / static_cast<double>(relief);
    if (!order.empty() && score > order.front().first * (1 + 1e-9)) {
      s_.rollback(mark);
      order.emplace_back(score, k);
      std::push_heap(order.begin(), order.end(), std::greater<>());
    }
  }
  return s_.feasible();
}

/// The idea of checkpointed segments (Chen et al., 2016), in several sizes: for long steps, where values are too many to
/// be tried one by one, and where single values do not lead under the limit. Leaves the cheapest that fits, or everything
/// as it was.
bool Search::repair_in_stretches() {
  if (!options_.recompute) return false;
  const Solution before = save();
  const std::int64_t limit = s_.limit();
  std::optional<Solution> best;
  double best_cost = 0;
  // The last stretch taken is often more than was missing. Aiming lower ends with other stretches, at times cheaper ones.
  for (const double aim : {1.0, 0.95}) {
    s_.set_limit(static_cast<std::int64_t>(aim * static_cast<double>(limit)));
    // Costs fall with finer stretches and then rise: a pass makes more for itself only.
    int no_better = 0;
    for (std::int32_t count = 8; count <= 300 && no_better < 2; count += count / 2) {
      s_.forget_history();
      const WorkLimit limited(*this, kLongWork / 20);
      if (drop_stretches(count) && (!best || s_.cost() < best_cost)) {
        best = save();
        best_cost = s_.cost();
        no_better = 0;
      } else if (best) {
        ++no_better;
      }
      s_.rollback(0);
    }
  }
  s_.set_limit(limit);
  s_.forget_history();
  load(best ? *best : before);
  return best.has_value();
}

bool Search::fits_again(std::int32_t value, const std::vector<Absence>& list) const {
  const auto profile = s_.profile();
  for (const Absence& x : list) {
    const std::int32_t end = std::min({x.b - 1, x.hi, p_.death[value]});
    for (std::int32_t t = x.lo; t <= end; ++t)
      if (profile[t] + p_.bytes[value] > s_.limit()) return false;
  }
  return true;
}

/// Take back what is not needed: absences whose end saves time and still fits, in the order of what they cost.
void Search::clean(bool thorough, const Near& near) {
  std::vector<std::pair<double, std::int32_t>> order;
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(p_.gaps.size()); ++g) {
    const Gap& gap = p_.gaps[g];
    if (std::abs(gap.a - near.a) > near.reach && std::abs(gap.b - near.b) > near.reach) continue;
    if (!touched(g)) continue;
    order.emplace_back(-(static_cast<double>(estimate_[g]) + 1e-9) * (1 + 0.2 * uniform()), g);
  }
  s_.work += static_cast<std::int64_t>(p_.gaps.size()) / 4;
  std::sort(order.begin(), order.end());
  for (auto& [key, g] : order) {
    if (s_.work > work_until_) break;
    const std::vector<Absence> now = inside(g);
    Move best;
    auto consider = [&](std::vector<Absence> list) {
      Move move{g, std::move(list), 0, 0};
      if (!probe(move) || move.violation > 0) return;
      if (move.cost < best.cost - kTiny) best = std::move(move);
    };
    s_.work += 4;
    if (thorough) {
      for (auto& list : variants(g)) {
        if (list.empty() && !fits_again(p_.gaps[g].value, now)) continue;
        consider(std::move(list));
      }
    } else if (fits_again(p_.gaps[g].value, now)) {
      consider({});
    }
    if (best.gap >= 0 && apply(best) && !best.list.empty() && best.list[0].mode == Mode::Offload) note_outside(best.gap);
  }
}

Search::Solution Search::save() const {
  Solution out;
  for (std::int32_t v = 0; v < p_.m; ++v)
    if (!s_.absences(v).empty()) out.emplace_back(v, s_.absences(v));
  return out;
}

void Search::load(const Solution& solution) {
  std::vector<const std::vector<Absence>*> want(p_.m, nullptr);
  for (const auto& [v, list] : solution) want[v] = &list;
  Schedule::Changes changes;
  for (std::int32_t v = 0; v < p_.m; ++v)
    if (want[v] ? *want[v] != s_.absences(v) : !s_.absences(v).empty())
      changes.emplace_back(v, want[v] ? *want[v] : std::vector<Absence>{});
  s_.assign_all(std::move(changes));
}

/// A pass, the likelier the more it costs.
std::int32_t Search::dear_pass() {
  double left = uniform() * s_.cost();
  std::int32_t last = -1;
  for (std::int32_t t = 0; t <= p_.n; ++t) {
    const double cost = s_.pass(t).cost;
    if (cost <= 0) continue;
    last = t;
    left -= cost;
    if (left <= 0) break;
  }
  s_.work += p_.n / 4;
  return last;
}

/// Give back some of what was taken, in one neighbourhood.
Search::Near Search::ruin() {
  std::vector<std::int32_t> away;
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(p_.gaps.size()); ++g)
    if (touched(g)) away.push_back(g);
  s_.work += static_cast<std::int64_t>(p_.gaps.size()) / 2;
  if (away.empty()) return {};
  const std::int32_t seed = away[pick(away.size())];
  const Gap& center = p_.gaps[seed];
  const std::int32_t around = p_.n <= 300 ? p_.n + 1 : std::max(30, p_.n / 16);
  std::vector<std::int32_t> chosen{seed};
  const double kind = uniform();
  const std::size_t size = 1 + static_cast<std::size_t>(pick(std::min<std::size_t>(6, away.size())));
  bool forbid = false;
  if (kind < 0.25) {  // all that comes back in one of the dearer passes
    const std::int32_t stage = dear_pass();
    if (stage >= 0) {
      chosen.clear();
      forbid = true;
      for (std::int32_t v : s_.pass(stage).due)
        for (std::int32_t g = first_gap_[v]; g < first_gap_[v + 1]; ++g)
          if (p_.gaps[g].a < stage && stage <= p_.gaps[g].b && chosen.size() < 16) chosen.push_back(g);
    }
  } else if (kind < 0.5) {  // anything
    while (chosen.size() < size) chosen.push_back(away[pick(away.size())]);
  } else if (kind < 0.75) {  // what comes back at about the same time
    const std::int32_t reach = 2 + p_.n / 12;
    for (int tries = 0; tries < 60 && chosen.size() < size; ++tries) {
      const std::int32_t g = away[pick(away.size())];
      if (std::abs(p_.gaps[g].b - center.b) <= reach || std::abs(p_.gaps[g].a - center.a) <= reach) chosen.push_back(g);
    }
  } else if (center.b <= p_.n) {  // what the pass that brings it back reads and makes
    const Pass& pass = s_.pass(std::min(center.b, p_.n));
    auto add = [&](std::int32_t v) {
      for (std::int32_t g = first_gap_[v]; g < first_gap_[v + 1]; ++g)
        if (chosen.size() < size + 2 && uniform() < 0.6) chosen.push_back(g);
    };
    for (std::int32_t v : pass.makes) add(v);
    for (std::int32_t v : pass.due) add(v);
  }
  for (std::int32_t g : chosen) {
    if (!touched(g)) continue;
    s_.assign(p_.gaps[g].value, compose(g, {}));
    if (forbid || uniform() < 0.5) tabu_[g] = iteration_ + 1 + static_cast<std::uint32_t>(pick(8));
  }
  if (chosen.empty()) return {};
  return {p_.gaps[chosen.front()].a, p_.gaps[chosen.front()].b, around};
}

/// One round. Keeps the outcome when it is better, or a little worse with luck.
bool Search::ruin_and_recreate(double temperature) {
  ++iteration_;
  s_.forget_history();
  const double cost = s_.cost();
  const std::int64_t violation = s_.violation();
  const double kind = uniform();
  Near near;
  if (kind < 0.8) {
    near = ruin();
  } else {  // force one more gap away, and see what that makes superfluous
    const std::int32_t g = pick(p_.gaps.size());
    auto ways = variants(g);
    if (!ways.empty()) {
      const auto& way = ways[pick(ways.size())];
      if (s_.assign(p_.gaps[g].value, compose(g, way)) && !way.empty() && way[0].mode == Mode::Offload) note_outside(g);
    }
  }
  Weighting weighting;
  const double power = uniform();
  weighting.power = power < 0.4 ? 1.0 : power < 0.7 ? 0.5 : 0.0;
  weighting.noise = uniform() < 0.3 ? 0.0 : uniform() * 1.5;
  weighting.tries = 4;
  repair(weighting);
  clean(uniform() < 0.5, near);
  const bool better = s_.violation() < violation ||
                      (s_.violation() == violation && s_.cost() <= cost - temperature * cost * std::log(std::max(1e-9, uniform())));
  if (!better) s_.rollback(0);
  return better;
}

void Search::improve(std::int64_t budget) {
  Solution best = save();
  double best_cost = s_.cost();
  std::int64_t best_violation = s_.violation();
  const std::int64_t start = s_.work;
  const WorkLimit limited(*this, budget);  // one round's repair alone can take longer
  const std::int64_t patience = 300 + static_cast<std::int64_t>(20 * p_.gaps.size() * std::max(1.0, options_.effort));
  std::int64_t idle = 0;  // rounds without a better best
  while (s_.work - start < budget && idle++ < patience && (s_.cost() > kTiny || !s_.feasible())) {
    const double left = 1.0 - static_cast<double>(s_.work - start) / static_cast<double>(budget);
    ruin_and_recreate(0.02 * left * left);
    if (s_.violation() < best_violation || (s_.violation() == best_violation && s_.cost() < best_cost - kTiny)) {
      best = save();
      best_cost = s_.cost();
      best_violation = s_.violation();
      idle = 0;
    }
  }
  s_.forget_history();
  load(best);
}

/// A first schedule of a short step: value by value, or in stretches where that does not lead under the limit.
void Search::begin_short() {
  const Solution start = save();
  repair({});
  if (!s_.feasible()) {
    const Solution least = save();
    load(start);
    if (!repair_in_stretches()) load(least);
  }
  clean(true, {});
}

/// A first schedule of a long step: in stretches and in batches, whichever is cheaper. That depends on whether some values
/// are much cheaper to make than others.
void Search::begin_long() {
  {
    const WorkLimit limited(*this, kLongWork);
    const Solution start = save();
    const bool found = repair_in_stretches();
    const Solution stretches = save();
    const double cost = s_.cost();
    load(start);
    s_.forget_history();
    repair_in_batches();
    if (found && (!s_.feasible() || s_.cost() > cost)) load(stretches);
    s_.forget_history();
    repair({});
  }
  if (!s_.feasible()) return;
  const WorkLimit limited(*this, static_cast<std::int64_t>(std::min(1.0, options_.effort) * kCleanWork));
  clean(true, {});
}

bool Search::run() {
  if (p_.gaps.empty() || s_.feasible()) return s_.feasible();
  if (options_.offload) offload_around();
  const bool long_step = p_.n > kLongStep;
  if (long_step) begin_long();
  else begin_short();
  s_.forget_history();
  if (options_.offload) offload_the_dear();
  improve(static_cast<std::int64_t>(options_.effort * 3e7));
  if (!long_step) clean(true, {});
  return s_.feasible();
}

double Search::free_write(std::int32_t except, double from, double length) const {
  std::vector<std::pair<double, double>> busy;
  for (std::int32_t v : outside_) {
    if (v == except) continue;
    for (const Absence& x : s_.absences(v))
      if (x.mode == Mode::Offload && x.a >= 0 && !(x.b > p_.n && written_[v] == 0))
        busy.emplace_back(x.write_at, x.write_at + options_.offload->latency + options_.offload->write_seconds_per_byte * static_cast<double>(p_.bytes[v]));
  }
  std::sort(busy.begin(), busy.end());
  for (const auto& [begin, end] : busy) {
    if (begin >= from + length) break;
    from = std::max(from, end);
  }
  return from;
}

/// The latest begin of a read that is over at `until`; may be negative: there is no time for it.
double Search::free_read(std::int32_t except, double until, double length) const {
  std::vector<std::pair<double, double>> busy;
  for (std::int32_t v : outside_) {
    if (v == except) continue;
    for (const Absence& x : s_.absences(v))
      if (x.mode == Mode::Offload && x.b <= p_.n)
        busy.emplace_back(x.read_at + options_.offload->latency + options_.offload->read_seconds_per_byte * static_cast<double>(p_.bytes[v]), x.read_at);
  }
  std::sort(busy.rbegin(), busy.rend());
  for (const auto& [end, begin] : busy) {
    if (end <= until - length) break;
    until = std::min(until, begin);
  }
  return until - length;
}

std::optional<Absence> Search::offload(std::int32_t gap) const {
  const Gap& g = p_.gaps[gap];
  if (g.a < 0 || g.b > p_.n || room_left_ < p_.bytes[g.value]) return std::nullopt;
  for (const Absence& x : s_.absences(g.value))
    if (x.mode == Mode::Offload && (x.a < 0 || x.b > p_.n)) return std::nullopt;  // its one copy outside is in use
  const double size = static_cast<double>(p_.bytes[g.value]);
  const OffloadChannels& c = *options_.offload;
  const double write = c.latency + c.write_seconds_per_byte * size, read = c.latency + c.read_seconds_per_byte * size;
  if (p_.start[g.b] - p_.start[g.a + 1] < write + read) return std::nullopt;  // saves the look at the channels
  const double write_at = free_write(g.value, p_.start[g.a + 1], write);
  const double read_at = free_read(g.value, p_.start[g.b], read);
  if (read_at <= write_at + write) return std::nullopt;
  const auto begin = p_.start.begin();
  const auto lo = static_cast<std::int32_t>(std::lower_bound(begin, p_.start.end(), write_at + write) - begin);
  const auto fetch = static_cast<std::int32_t>(std::upper_bound(begin, p_.start.end(), read_at) - begin) - 1;
  if (fetch <= lo || fetch > g.b) return std::nullopt;
  return Absence{g.a, g.b, lo, fetch - 1, Mode::Offload, static_cast<float>(write_at), static_cast<float>(read_at)};
}

/// What lives across steps and is idle around the boundary: away from its last use to its first use in the next step.
void Search::offload_around() {
  struct Stay {
    std::int32_t first, last;  // the version at the start of the step and the one at its end
    double score;
  };
  std::vector<std::int32_t> next(p_.m, -1);
  for (std::int32_t v = 0; v < p_.m; ++v)
    if (p_.overwrites[v] >= 0) next[p_.overwrites[v]] = v;
  std::vector<Stay> stays;
  for (std::int32_t v = 0; v < p_.m; ++v) {
    if (p_.producer[v] >= 0 || !p_.movable[v]) continue;
    std::int32_t last = v;
    while (next[last] >= 0) last = next[last];
    if (p_.death[last] != p_.n || !p_.movable[last] || p_.uses[v].empty() || p_.uses[v][0] >= p_.n) continue;
    const std::int32_t end = p_.uses[last].size() > 1 ? p_.uses[last][p_.uses[last].size() - 2] : p_.birth[last];
    if (end < 0) continue;
    const double idle = p_.start[p_.uses[v][0]] + p_.start[p_.n] - p_.start[end + 1];
    stays.push_back({v, last, -idle * static_cast<double>(p_.bytes[v])});
  }
  std::sort(stays.begin(), stays.end(), [](const Stay& a, const Stay& b) { return a.score < b.score; });
  const OffloadChannels& c = *options_.offload;
  for (const Stay& stay : stays) {
    if (s_.feasible()) return;
    const double size = static_cast<double>(p_.bytes[stay.first]);
    if (room_left_ < p_.bytes[stay.first]) continue;
    const std::int32_t use = p_.uses[stay.first][0];
    const auto uses = p_.uses[stay.last];
    const std::int32_t end = uses.size() > 1 ? uses[uses.size() - 2] : p_.birth[stay.last];
    const bool writes = stay.first != stay.last;
    const double write = writes ? c.latency + c.write_seconds_per_byte * size : 0.0, read = c.latency + c.read_seconds_per_byte * size;
    written_[stay.last] = writes;
    const double write_at = writes ? free_write(stay.last, p_.start[end + 1], write) : p_.start[end + 1];
    const double read_at = free_read(stay.first, p_.start[use], read);
    if (read_at < 0 || write_at + write > p_.start[p_.n]) continue;
    const auto begin = p_.start.begin();
    const auto lo = std::max(end + 1, static_cast<std::int32_t>(std::lower_bound(begin, p_.start.end(), write_at + write) - begin));
    const auto fetch = static_cast<std::int32_t>(std::upper_bound(begin, p_.start.end(), read_at) - begin) - 1;
    const std::size_t mark = s_.mark();
    const std::int64_t violation = s_.violation();
    auto head = s_.absences(stay.first);
    head.insert(head.begin(), Absence{-1, use, 0, fetch - 1, Mode::Offload, 0, static_cast<float>(read_at)});
    bool done = s_.assign(stay.first, head);
    auto tail = s_.absences(stay.last);
    tail.push_back(Absence{end, p_.n + 1, lo, p_.n, Mode::Offload, static_cast<float>(write_at), 0});
    done = done && s_.assign(stay.last, tail);
    if (!done || s_.violation() >= violation) {
      s_.rollback(mark);
      continue;
    }
    room_left_ -= p_.bytes[stay.first];
    outside_.push_back(stay.first);
    if (writes) outside_.push_back(stay.last);
  }
}

/// Recomputation that costs most per byte gives way to traffic, as far as the channels are free.
void Search::offload_the_dear() {
  std::vector<std::pair<double, std::int32_t>> order;
  for (std::int32_t g = 0; g < static_cast<std::int32_t>(p_.gaps.size()); ++g)
    if (touched(g) && p_.gaps[g].a >= 0 && p_.gaps[g].b <= p_.n)
      order.emplace_back(-static_cast<double>(estimate_[g]) / static_cast<double>(p_.bytes[p_.gaps[g].value]), g);
  std::sort(order.begin(), order.end());
  for (const auto& [key, g] : order) {
    const auto away = offload(g);
    if (!away) continue;
    Move move{g, {*away}, 0, 0};
    if (!probe(move) || move.violation > 0 || move.cost >= -kTiny || !apply(move)) continue;
    note_outside(g);
  }
}

void Search::note_outside(std::int32_t gap) {
  const std::int32_t v = p_.gaps[gap].value;
  written_[v] = 1;
  if (std::find(outside_.begin(), outside_.end(), v) == outside_.end()) {
    outside_.push_back(v);
    room_left_ -= p_.bytes[v];
  }
}

}  // namespace memfit::plan::detail
