#include "dispatcher/kernels/replay_trial.h"

#include <gtest/gtest.h>

namespace eagercache {
namespace {

using Verdict = ReplayTrial::Verdict;

// The verdict after `calls` of each kind.
Verdict verdict_of(ReplayTrial::Times run, ReplayTrial::Times replayed, int calls = 12) {
  ReplayTrial trial;
  for (int i = 0; i < calls; ++i) {
    trial.add(false, run);
    trial.add(true, replayed);
  }
  return trial.verdict();
}

TEST(ReplayTrial, StaysOpenUntilBothKindsHaveCome) {
  ReplayTrial trial;
  EXPECT_EQ(trial.verdict(), Verdict::kOpen);
  for (int i = 0; i < 100; ++i) {
    trial.add(true, {1, 1});
  }
  EXPECT_EQ(trial.verdict(), Verdict::kOpen);
  EXPECT_EQ(verdict_of({2, 2}, {1, 1}, 4), Verdict::kOpen);
}

TEST(ReplayTrial, ReplaysWhatIsFasterOnBothSides) {
  EXPECT_EQ(verdict_of({2.0F, 1.9F}, {0.4F, 0.05F}), Verdict::kReplay);
}

TEST(ReplayTrial, ReplaysWhatSparesTheHostAndCostsTheDeviceNothing) {
  EXPECT_EQ(verdict_of({2.0F, 0.3F}, {2.0F, 0.05F}), Verdict::kReplay);
}

TEST(ReplayTrial, RunsWhatTheCopiesMakeSlowerOnTheDevice) {
  EXPECT_EQ(verdict_of({2.0F, 0.3F}, {2.2F, 0.05F}), Verdict::kRun);
}

TEST(ReplayTrial, RunsWhatTheHostTakesLongerToReplay) {
  EXPECT_EQ(verdict_of({2.0F, 0.03F}, {2.0F, 0.05F}), Verdict::kRun);
}

TEST(ReplayTrial, OneDisturbedCallDecidesNothing) {
  ReplayTrial trial;
  for (int i = 0; i < 12; ++i) {
    trial.add(false, {2, 1});
    trial.add(true, i == 5 ? ReplayTrial::Times{50, 50} : ReplayTrial::Times{1, 0.1F});
  }
  EXPECT_EQ(trial.verdict(), Verdict::kReplay);
}

TEST(ReplayTrial, KindsTakeTurnsWhereNothingCanBeTimed) {
  ReplayTrial trial;
  const bool first = trial.replays_next();
  trial.end(trial.begin(nullptr), nullptr);  // without a driver no call is timed
  EXPECT_NE(trial.replays_next(), first);
  EXPECT_EQ(trial.verdict(), Verdict::kOpen);
}

}  // namespace
}  // namespace eagercache
