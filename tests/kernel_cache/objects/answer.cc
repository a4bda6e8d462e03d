// The smallest kernel: says its number. Tests patch the number behind the marker in the built file,
// and so make as many different objects as they need.
extern "C" {

struct Number {
  unsigned char marker[16];
  unsigned long long value;
};

__attribute__((used, visibility("hidden"))) const volatile Number number = {
    {'E', 'A', 'G', 'E', 'R', 'C', 'A', 'C', 'H', 'E', '-', 'N', 'U', 'M', 'B', 'R'}, 0};

__attribute__((visibility("default"))) unsigned long long answer() { return number.value; }
}
