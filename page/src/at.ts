// Places an element by the style object, which the page's security policy allows.
import { Directive, directive, type ElementPart, PartType, type PartInfo } from "lit-html/directive.js";
import { noChange } from "lit-html";

class At extends Directive {
  private before = "";

  constructor(info: PartInfo) {
    super(info);
    if (info.type !== PartType.ELEMENT) throw new Error("`at` belongs into an element's tag");
  }

  render(_place: { x: number; y: number; width: number; height: number }): unknown {
    return noChange;
  }

  override update(part: ElementPart, [place]: Parameters<this["render"]>): unknown {
    const key = `${place.x} ${place.y} ${place.width} ${place.height}`;
    if (key !== this.before) {
      this.before = key;
      const { style } = part.element as HTMLElement;
      style.left = `${place.x}px`;
      style.top = `${place.y}px`;
      style.width = `${place.width}px`;
      style.height = `${place.height}px`;
    }
    return noChange;
  }
}

export const at = directive(At);
