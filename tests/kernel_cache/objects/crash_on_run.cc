// An object whose first run ends the process.
extern "C" {

__attribute__((visibility("default"))) unsigned long long answer() { __builtin_trap(); }
}
