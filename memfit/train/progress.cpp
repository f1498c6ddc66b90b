#include "memfit/train/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "memfit/core/duration.h"

namespace memfit::train {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

ProgressStyle resolve(ProgressStyle style) {
  if (style != ProgressStyle::Auto) return style;
  return ::isatty(STDERR_FILENO) != 0 ? ProgressStyle::Bar : ProgressStyle::Lines;
}

}  // namespace

std::string json_line(const StepReport& r) {
  nlohmann::ordered_json out = {{"step", r.step}, {"epoch", r.epoch}, {"loss", r.loss}, {"lr", r.learning_rate}, {"grad_norm", nullptr},
                        {"rows", r.rows}, {"seconds", r.seconds}, {"used_bytes", nullptr}, {"peak_bytes", nullptr}, {"limit_bytes", nullptr},
                        {"micro_batches", r.micro_batches}, {"skipped", r.skipped}, {"retries", r.retries}};
  if (!std::isfinite(r.loss)) out["loss"] = nullptr;
  if (r.gradient_norm && std::isfinite(*r.gradient_norm)) out["grad_norm"] = *r.gradient_norm;
  if (r.used) out["used_bytes"] = r.used->count();
  if (r.peak) out["peak_bytes"] = r.peak->count();
  if (r.limit) out["limit_bytes"] = r.limit->count();
  return out.dump();
}

Progress::Progress(std::ostream& out, ProgressStyle style, std::optional<std::int64_t> steps)
    : out_(out), style_(resolve(style)), steps_(steps), start_(steady_clock::now()) {}

Progress::~Progress() {
  if (style_ == ProgressStyle::Lines && newest_.step > said_) out_ << line_of(newest_) << '\n';
  if (bar_open_) out_ << '\r' << line_of(newest_) << "\x1b[K\n";
  out_.flush();
}

std::string Progress::line_of(const StepReport& r) const {
  const double elapsed = std::chrono::duration<double>(steady_clock::now() - start_).count();
  const double rate = elapsed > 0 ? static_cast<double>(r.step - first_step_ + 1) / elapsed : 0;
  std::string out = fmt::format("step {}", r.step);
  if (steps_) {
    out += fmt::format("/{}", *steps_);
    if (style_ == ProgressStyle::Bar) {
      const auto full = static_cast<std::size_t>(20 * std::min(r.step, *steps_) / std::max<std::int64_t>(1, *steps_));
      out = fmt::format("[{:<20}] {}", std::string(full, '#'), out);
    }
  }
  out += fmt::format("  epoch {}  loss {:.6g}  {:.2f} steps/s", r.epoch, r.loss, rate);
  if (r.used && r.limit) out += fmt::format("  {} of {}", format_bytes(*r.used), format_bytes(*r.limit));
  if (steps_ && rate > 0 && *steps_ > r.step) {
    out += "  left " + format_duration(std::chrono::nanoseconds(static_cast<std::int64_t>(static_cast<double>(*steps_ - r.step) / rate * 1e9)));
  }
  return out;
}

void Progress::step(const StepReport& report) {
  if (first_step_ < 0) first_step_ = report.step;
  newest_ = report;
  if (style_ == ProgressStyle::Json) {
    out_ << json_line(report) << '\n' << std::flush;
    return;
  }
  const auto now = steady_clock::now();
  const auto pause = style_ == ProgressStyle::Bar ? steady_clock::duration(100ms) : steady_clock::duration(10s);
  if (style_ == ProgressStyle::Off || (said_ > 0 && now - last_ < pause)) return;
  last_ = now;
  said_ = report.step;
  if (style_ == ProgressStyle::Bar) {
    bar_open_ = true;
    out_ << '\r' << line_of(report) << "\x1b[K" << std::flush;
  } else {
    out_ << line_of(report) << '\n' << std::flush;
  }
}

void Progress::say(const std::string& line) {
  if (style_ == ProgressStyle::Off || style_ == ProgressStyle::Json) return;
  out_ << (bar_open_ ? "\r\x1b[K" : "") << line << '\n' << std::flush;
}

}  // namespace memfit::train
