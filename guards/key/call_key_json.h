#pragma once

// The description of a call for who adds to it, before it is text: describe_call() (call_key.h) is
// its dump. Apart from call_key.h so that few files see the JSON library. Any thread.

#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

#include "guards/key/call_key.h"

namespace eagercache {

// Null when the words do not decode.
nlohmann::ordered_json call_description(std::span<const Word> words,
                                        std::span<const std::string> names = {});

}  // namespace eagercache
