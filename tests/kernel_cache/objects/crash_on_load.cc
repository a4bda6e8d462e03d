// An object whose loading ends the process.
extern "C" {

__attribute__((constructor)) void crash() { __builtin_trap(); }

__attribute__((visibility("default"))) unsigned long long answer() { return 1; }
}
