// Texts that are hard to read: those whose contrast with what is behind them is below 4.5 (WCAG 2.2, AA).
() => {
  const channels = (color) => color.match(/[\d.]+/g).map(Number);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const [r, g, b, alpha = 1] = channels(getComputedStyle(one).backgroundColor);
      if (alpha > 0.99) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const hard = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility() || node.closest(":disabled")) continue;
    const style = getComputedStyle(node);
    const inDrawing = node.closest("svg") !== null;
    const color = channels(inDrawing ? style.fill : style.color).slice(0, 3);
    const [light, dark] = [luminance(color), luminance(behind(node))].sort((one, other) => other - one);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < 4.5) hard.push(`${node.tagName} ${node.className} ${contrast.toFixed(2)}: ${node.textContent}`);
  }
  return hard;
}
