#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "dispatcher/kernels/kernel_forms.h"
#include "kernel_cache/base/digest.h"

namespace eagercache {
namespace {

ObjectRef object(const std::string& contents) {
  Hasher hasher("test");
  hasher.add_text(contents);
  return {ObjectKind::kCubin, hasher.finish(), contents.size()};
}

TEST(KernelIdentity, EveryObjectCounts) {
  const c10::Device device(c10::DeviceType::CUDA, 0);
  const KernelForm form{"cuda", "plan", ""};
  const auto identity = [&](const std::vector<ObjectRef>& objects) {
    return kernel_identity(objects, device, form);
  };
  const std::string both = identity({object("fill"), object("copy to +2")});
  EXPECT_EQ(both, identity({object("fill"), object("copy to +2")}));
  EXPECT_NE(both, identity({object("fill"), object("copy to -2")}));
  EXPECT_NE(both, identity({object("copy to +2"), object("fill")}));
  EXPECT_NE(both, identity({object("fill")}));
}

TEST(KernelIdentity, DeviceAndFormCount) {
  const std::vector<ObjectRef> objects{object("fill")};
  const c10::Device first(c10::DeviceType::CUDA, 0);
  const std::string one = kernel_identity(objects, first, {"cuda", "plan", ""});
  EXPECT_NE(one, kernel_identity(objects, {c10::DeviceType::CUDA, 1}, {"cuda", "plan", ""}));
  EXPECT_NE(one, kernel_identity(objects, first, {"cuda", "another", ""}));
  EXPECT_NE(one, kernel_identity(objects, first, {"bare", "plan", ""}));
  EXPECT_NE(one, kernel_identity(objects, first, {"cuda", "plan", "[]"}));
}

}  // namespace
}  // namespace eagercache
