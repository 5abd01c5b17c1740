#include "kernels/features.h"

#include <atomic>
#include <cstring>

#include "hwy/targets.h"
#include "kernels/cpu/dispatch.h"

namespace weft::kernels {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512", "avx512_bf16"};

InstructionSet best() {
  static const InstructionSet set = [] {
    const int64_t targets = hwy::SupportedTargets();
    if ((targets & HWY_AVX3) != 0) {
      return __builtin_cpu_supports("avx512bf16") != 0 ? InstructionSet::kAvx512Bf16
                                                       : InstructionSet::kAvx512;
    }
    return (targets & HWY_AVX2) != 0 ? InstructionSet::kAvx2 : InstructionSet::kPortable;
  }();
  return set;
}

std::atomic<InstructionSet>& chosen() {
  static std::atomic<InstructionSet> set{best()};
  return set;
}

int64_t highway_target(InstructionSet set) {
  switch (set) {
    case InstructionSet::kPortable:
      return HWY_STATIC_TARGET;
    case InstructionSet::kAvx2:
      return HWY_AVX2;
    case InstructionSet::kAvx512:
    case InstructionSet::kAvx512Bf16:
      return HWY_AVX3;
  }
  return HWY_STATIC_TARGET;
}

}  // namespace

InstructionSet instruction_set_in_use() { return chosen().load(std::memory_order_relaxed); }

bool have_byte_permutes() {
  static const bool present = __builtin_cpu_supports("avx512vbmi") != 0;
  return present && instruction_set_in_use() >= InstructionSet::kAvx512;
}

const char* instruction_set() { return kNames[static_cast<int>(instruction_set_in_use())]; }

bool use_instruction_set(const char* name) {
  for (int i = 0; i <= static_cast<int>(best()); ++i) {
    if (std::strcmp(kNames[i], name) != 0) continue;
    const auto set = static_cast<InstructionSet>(i);
    // Highway's own switch: its dispatch tables then pick this target (and its always-present baseline).
    hwy::SetSupportedTargetsForTest(set == best() ? 0 : highway_target(set));
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    chosen().store(set, std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace weft::kernels
