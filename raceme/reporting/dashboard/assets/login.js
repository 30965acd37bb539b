// The token behind the # of the address becomes a cookie, and leaves the history of the browser.

const token = new URLSearchParams(location.hash.slice(1)).get("token");
if (token) {
  history.replaceState(null, "", "/");
  document.querySelector("[name=token]").value = token;
  document.querySelector("form").submit();
}
