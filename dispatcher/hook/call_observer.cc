#include "dispatcher/hook/call_observer.h"

namespace eagercache {

constinit thread_local CallTaker* CallTaker::first_ = nullptr;

void CallTaker::attach() noexcept {
  next_ = first_;
  first_ = this;
}

void CallTaker::detach() noexcept {
  for (CallTaker** place = &first_; *place != nullptr; place = &(*place)->next_) {
    if (*place == this) {
      *place = next_;
      return;
    }
  }
}

CallTaker* CallTaker::find(const OperatorHook& hook) noexcept {
  CallTaker* taker = first_;
  while (taker != nullptr && !taker->waits_for(hook)) {
    taker = taker->next_;
  }
  return taker;
}

}  // namespace eagercache
