// After the login, the page shows the view that was asked for.

const form = document.querySelector("form");
form.action = new URL(form.action).pathname + location.hash;
