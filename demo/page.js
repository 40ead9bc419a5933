// The numbers of a token, beside it: one box for all, kept inside the window. Text only, never HTML.
(() => {
  let box = null;
  const hide = () => box && (box.hidden = true);
  const show = (event) => {
    const token = event.target.closest ? event.target.closest(".tok") : null;
    if (!token) return hide();
    if (!box) {
      box = document.createElement("div");
      box.id = "tip";
      document.body.append(box);
    }
    box.textContent = token.dataset.tip;
    box.hidden = false;
    const place = token.getClientRects()[0] || token.getBoundingClientRect();
    const left = Math.min(place.left, window.innerWidth - box.offsetWidth - 8);
    const below = place.bottom + 6 + box.offsetHeight < window.innerHeight;
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${Math.max(8, below ? place.bottom + 6 : place.top - box.offsetHeight - 6)}px`;
  };
  document.addEventListener("mouseover", show);
  document.addEventListener("click", show); // fingers do not hover
  document.addEventListener("scroll", hide, true);
})();
