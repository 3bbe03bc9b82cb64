"""What LaTeX macros stand for in plain text: symbols, functions, spacing, fonts."""

# ruff: noqa: RUF001  the look-alikes are what this table is about

from __future__ import annotations

_SYMBOLS = r"""
alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ
lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ
varphi φ chi χ psi ψ omega ω digamma ϝ Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ
Psi Ψ Omega Ω le ≤ leq ≤ ge ≥ geq ≥ leqslant ⩽ geqslant ⩾ ll ≪ gg ≫ neq ≠ equiv ≡ approx ≈ cong ≅ sim ∼
simeq ≃ propto ∝ asymp ≍ doteq ≐ prec ≺ succ ≻ nleq ≰ ngeq ≱ mid | nmid ∤ parallel ∥ perp ⊥ subset ⊂
subseteq ⊆ subsetneq ⊊ supset ⊃ supseteq ⊇ supsetneq ⊋ in ∈ notin ∉ ni ∋ cup ∪ cap ∩ bigcup ⋃ bigcap ⋂
uplus ⊎ sqcup ⊔ setminus ∖ emptyset ∅ varnothing ∅ complement ∁ forall ∀ exists ∃ nexists ∄ lnot ¬ wedge ∧
vee ∨ oplus ⊕ otimes ⊗ odot ⊙ times × cdot · div ÷ pm ± mp ∓ textpm ± ast ∗ star ⋆ circ ∘ bullet ∙ amalg ⨿
dagger † to → rightarrow → leftarrow ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ mapsto ↦
longrightarrow ⟶ uparrow ↑ downarrow ↓ hookrightarrow ↪ infty ∞ partial ∂ nabla ∇ sum ∑ prod ∏ int ∫ iint ∬
oint ∮ ldots … dots … dotsc … dotsb … cdots ⋯ vdots ⋮ ddots ⋱ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈
rceil ⌉ lbrace { rbrace } lvert | rvert | vert | Vert ‖ angle ∠ measuredangle ∡ square □ blacksquare ▪
diamond ♢ triangleq ≜ textdegree ° prime ' hbar ħ ell ℓ aleph ℵ beth ℶ wp ℘ therefore ∴ because ∵ top ⊤
vdash ⊢ backslash \ texteuro € & & # # _ _ $ $ { { } } % %
"""
_words = _SYMBOLS.split()
SYMBOLS = dict(zip(_words[::2], _words[1::2], strict=True))
_FUNCTIONS = "ln log sin cos tan arcsin arccos arctan sinh cosh tanh exp max min lim inf sup"
FUNCTIONS = frozenset(_FUNCTIONS.split())
"""Macros that stand for their own name. The others of LaTeX (`\\cot`, `\\sec`, `\\gcd`) vanish, as in the rule."""
SPACES = {",": " ", ";": " ", ":": " ", " ": " ", "\n": " ", "quad": "  ", "qquad": "    ", "\\": "\n"}
SWALLOWED = {"mbox": 1, "label": 1, "hspace": 1, "color": 1}
"""Macros that vanish with so many arguments."""
ACCENTS = {"hat": "\u0302", "bar": "\u0305", "tilde": "\u0303", "vec": "\u20d7", "dot": "\u0307", "ddot": "\u0308"}
FONTS = {
    "mathbf": "MATHEMATICAL BOLD",
    "mathit": "MATHEMATICAL ITALIC",
    "mathbb": "MATHEMATICAL DOUBLE-STRUCK",
    "mathsf": "MATHEMATICAL SANS-SERIF",
    "mathtt": "MATHEMATICAL MONOSPACE",
    "mathcal": "MATHEMATICAL SCRIPT",
    "mathscr": "MATHEMATICAL SCRIPT",
    "mathfrak": "MATHEMATICAL FRAKTUR",
}
MATRICES = frozenset({"array", "pmatrix", "bmatrix", "smallmatrix", "psmallmatrix", "bsmallmatrix"})
LIGATURES = {"---": "—", "--": "–", "``": "“", "''": "”", "~": "\u00a0"}
