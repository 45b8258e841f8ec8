#include <gtest/gtest.h>
#include "kvtransfer/traffic_manager.h"
TEST(Smoke, Links) { SUCCEED(); }
