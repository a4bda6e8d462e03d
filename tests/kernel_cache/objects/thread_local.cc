// An object with a PT_TLS segment. Compiled for the initial-exec model it needs static TLS, which
// the ELF check refuses; dynamic TLS passes.
extern "C" {

thread_local int counter = 7;

__attribute__((visibility("default"))) int* counter_address() { return &counter; }
}
