// What is refused at submission, in the caller's thread, because it could only fail later.
#pragma once

#include <string>
#include <vector>

#include "traffic/operation.h"

namespace kvtransfer {

// Each throws Error(kInvalidArgument) that says what is wrong.
void require(bool condition, const std::string& what);
void check_slots(const BufferPool& pool, const std::vector<uint32_t>& slots);
void check_move(const MoveSpec& spec, MoveKind kind, const BlockLayout& layout,
                const BufferPool& pool, bool has_device);

}  // namespace kvtransfer
