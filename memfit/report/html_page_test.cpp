#include "memfit/report/html_page.h"

#include <gtest/gtest.h>

namespace memfit::report {

TEST(HtmlPage, TextCannotBecomeMarkup) {
  EXPECT_EQ(html_escape("<a b=\"c\">&'"), "&lt;a b=&quot;c&quot;&gt;&amp;&#39;");
}

TEST(HtmlPage, CarriesUplotAndNeedsNoNetwork) {
  const std::string page = render_html_page({.title = "t", .body = "b", .data = "{}", .script = "", .style = ""});
  EXPECT_NE(page.find("uPlot=function"), std::string::npos);
  EXPECT_EQ(page.find("src=\"http"), std::string::npos);
  EXPECT_EQ(page.find("href=\"http"), std::string::npos);
}

TEST(HtmlPage, DataCannotEndItsScriptElement) {
  const std::string page =
      render_html_page({.title = "", .body = "", .data = R"(["</script><b>"])", .script = "", .style = ""});
  EXPECT_EQ(page.find("</script><b>"), std::string::npos);
  EXPECT_NE(page.find("\\u003c/script>"), std::string::npos);
}

}  // namespace memfit::report
