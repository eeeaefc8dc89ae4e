#pragma once
#include <string>
namespace std_msgs::msg {
struct String {
  std::string data;
};
}  // namespace std_msgs::msg
