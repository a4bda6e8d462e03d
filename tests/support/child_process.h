#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <utility>

namespace eagercache {

// Runs `body` (returning an int in 0..125) in a forked child that is killed after `seconds`.
// Returns what it returned, or 128 + the signal that ended it.
template <typename Body>
int run_in_child(Body body, unsigned int seconds = 20) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(seconds);
    ::_exit(std::move(body)());
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child) return 127;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace eagercache
