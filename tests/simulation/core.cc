#include "tests/simulation/core.h"

namespace weft::simulation {

void Core::feed(const controlplane::Event& event) {
  if (seams.lose_event && seams.lose_event(event)) return;
  handle({&event, 1});
  handle_due();
}

void Core::pass(Duration duration) {
  now = now + duration;
  handle_due();
}

// What came up while a plan was made is due at once.
void Core::handle_due() {
  for (int i = 0; i < 100; ++i) {
    const auto due = plane.next_deadline();
    if (!due || *due > now) return;
    handle({});
  }
  verdict.expect(Checker::kDeadlines, false, "something stays due");
}

void Core::handle(std::span<const controlplane::Event> events) {
  touched = true;
  ledger.remember(plane);
  std::vector<Notice> notices = plane.handle(now, events);
  if (seams.notices) seams.notices(notices);
  ledger.take(notices);
  ledger.place(plane);
}

}  // namespace weft::simulation
