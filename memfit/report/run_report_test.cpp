#include "memfit/report/run_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

namespace memfit::report {
namespace {

using namespace memfit::literals;
using trace::RunStatus;

struct Page {
  std::unique_ptr<RunStatus> owner = std::make_unique<RunStatus>();
  RunStatus* operator->() { return owner.get(); }
  const RunStatus* get() const { return owner.get(); }
};

Page page_of_a_limited_run() {
  Page page;
  page->rank = -1;
  page->limit_tensor_bytes = (150_MiB).count();
  page->peak_bytes = (149_MiB).count();
  page->unlimited_peak_bytes = (331_MiB).count();
  page->peak_rss_bytes = (400_MiB).count();
  page->ops = 1000;
  page->evictions = 812;
  page->recompute_ns = 500'000'000;
  page->largest_holders[0].bytes = 4096;
  trace::set_text(page->largest_holders[0].op, "aten::mm");
  trace::set_text(page->largest_holders[0].shape, "[32, 32]");
  return page;
}

RunFacts facts_of_ten_seconds() {
  RunFacts facts;
  facts.program = {"python", "train.py"};
  facts.exit_status = 0;
  facts.wall = std::chrono::seconds(10);
  return facts;
}

TEST(RunReport, HasEveryDocumentedKeyWithAndWithoutAPage) {
  const Page page = page_of_a_limited_run();
  const auto with = run_report_json(page.get(), facts_of_ten_seconds());
  const auto without = run_report_json(nullptr, facts_of_ten_seconds());
  for (const char* key : {"version", "program", "torch_version", "device", "limit_kind", "limit_bytes", "peak_bytes",
                          "peak_rss_bytes", "unlimited_peak_bytes", "ops", "evictions", "recomputed_ops",
                          "recompute_seconds", "engine_seconds", "largest_holders", "exit_status"}) {
    EXPECT_TRUE(with.contains(key)) << key;
    EXPECT_TRUE(without.contains(key)) << key;
  }
  EXPECT_EQ(with.size(), without.size());
}

TEST(RunReport, SaysWhatThePageSays) {
  const Page page = page_of_a_limited_run();
  const auto json = run_report_json(page.get(), facts_of_ten_seconds());
  EXPECT_EQ(json["program"], nlohmann::json({"python", "train.py"}));
  EXPECT_EQ(json["limit_kind"], "tensor_memory");
  EXPECT_EQ(json["limit_bytes"], (150_MiB).count());
  EXPECT_EQ(json["peak_bytes"], (149_MiB).count());
  EXPECT_EQ(json["peak_rss_bytes"], (400_MiB).count());
  EXPECT_EQ(json["recompute_seconds"], 0.5);
  EXPECT_EQ(json["largest_holders"].size(), 1U);
  EXPECT_EQ(json["largest_holders"][0]["op"], "aten::mm");
  EXPECT_TRUE(json["rank"].is_null());
}

TEST(RunReport, SaysNullForWhatIsNotKnown) {
  const auto json = run_report_json(nullptr, RunFacts{});
  for (const char* key :
       {"torch_version", "device", "limit_bytes", "peak_bytes", "ops", "exit_status", "recompute_seconds"}) {
    EXPECT_TRUE(json[key].is_null()) << key;
  }
  EXPECT_EQ(json["limit_kind"], "none");
  EXPECT_EQ(json["attached"], false);
}

TEST(RunReport, NamesTheTensorLimitWhereBothAreGiven) {
  Page page = page_of_a_limited_run();
  page->limit_memory_bytes = (1_GiB).count();
  const auto json = run_report_json(page.get(), {});
  EXPECT_EQ(json["limit_kind"], "tensor_memory");
  EXPECT_EQ(json["limit_bytes"], (150_MiB).count());
  EXPECT_EQ(json["memory_limit_bytes"], (1_GiB).count());
  page->limit_tensor_bytes = 0;
  EXPECT_EQ(run_report_json(page.get(), {})["limit_kind"], "memory");
}

TEST(RunReport, SaysNullForAPlanThatWasNotMade) {
  Page page = page_of_a_limited_run();
  EXPECT_TRUE(run_report_json(page.get(), {})["predicted_peak_bytes"].is_null());
  page->planned_steps = 1;
  page->predicted_peak_bytes = 5;
  EXPECT_EQ(run_report_json(page.get(), {})["predicted_peak_bytes"], 5);
}

TEST(RunReport, LineSaysLimitPeakEvictionsAndShare) {
  Page page = page_of_a_limited_run();
  EXPECT_EQ(run_report_line(page.get(), facts_of_ten_seconds()),
            "tensor memory limit 150.0 MiB, peak 149.0 MiB (400.0 MiB resident), 812 evictions, 5.0 % of the time "
            "recomputing");
  page->evictions = 1;
  page->verified_values = 3;
  EXPECT_THAT(run_report_line(page.get(), facts_of_ten_seconds()), testing::HasSubstr("1 eviction, "));
  EXPECT_THAT(run_report_line(page.get(), facts_of_ten_seconds()), testing::EndsWith("3 values verified, 0 wrong"));
}

TEST(RunReport, TellsAProgramThatARefusalEndedFromOneThatHandledIt) {
  Page page = page_of_a_limited_run();
  RunFacts failed;
  failed.exit_status = 1;
  EXPECT_FALSE(ended_by_refusal(*page.get(), failed)) << "nothing was refused";
  page->refusals = 1;
  page->ops_at_last_refusal = 990;
  EXPECT_TRUE(ended_by_refusal(*page.get(), failed));
  RunFacts fine;
  fine.exit_status = 0;
  EXPECT_FALSE(ended_by_refusal(*page.get(), fine)) << "the program handled it";
  RunFacts aborted;
  aborted.exit_status = 128 + SIGABRT;
  aborted.signal = SIGABRT;
  EXPECT_TRUE(ended_by_refusal(*page.get(), aborted)) << "an uncaught C++ exception";
  RunFacts killed;
  killed.exit_status = 128 + SIGTERM;
  killed.signal = SIGTERM;
  EXPECT_FALSE(ended_by_refusal(*page.get(), killed)) << "somebody else ended it";
  page->ops_at_last_refusal = 10;
  EXPECT_FALSE(ended_by_refusal(*page.get(), failed)) << "it worked on and failed later";
}

TEST(RunReport, RanksAndFurtherProcessesHaveFilesOfTheirOwn) {
  EXPECT_EQ(rank_report_path("run.json", -1), "run.json");
  EXPECT_EQ(rank_report_path("run.json", 0), "run.rank0.json");
  EXPECT_EQ(rank_report_path("a.b/run", 12), "a.b/run.rank12");
  EXPECT_EQ(rank_report_path("/tmp/.run", 1), "/tmp/.run.rank1");
  EXPECT_EQ(numbered_report_path("run.json", 2), "run.2.json");
}

}  // namespace
}  // namespace memfit::report
