// An object with a PT_TLS segment, which the ELF check refuses.
extern "C" {

thread_local int counter = 7;

__attribute__((visibility("default"))) int* counter_address() { return &counter; }
}
