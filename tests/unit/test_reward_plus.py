"""What `deepscaler_plus` accepts and refuses, by the kind of the label, and what restyling must not change.

Nothing is faked. The pairs are worked out by hand.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.graders import deepscaler_plus as rule
from services.reward.graders.plus.choices import is_choice
from services.reward.graders.plus.compare import same
from services.reward.graders.plus.normal import clean
from services.reward.graders.plus.reading import is_grouped
from services.reward.verdicts import Graded, Item, Question, Reason, Verdict

RIGHT = r"""
# numbers
1,234  ~~  1234
1{,}234  ~~  1234
1\,234  ~~  1234
1 234  ~~  1234
12,345,678  ~~  12345678
1,\! 234  ~~  1234
+5  ~~  5
5.  ~~  5
05  ~~  5
5.00  ~~  5
.5  ~~  0.5
\mathbf{7}  ~~  7
\boldsymbol{7}  ~~  7
{7}  ~~  7
\text{7}  ~~  7
$7$  ~~  7
\(7\)  ~~  7
\frac{6}{8}  ~~  \frac34
3/4  ~~  0.75
\dfrac{-3}{4}  ~~  -0.75
-\frac34  ~~  \frac{-3}{4}
1\frac{1}{2}  ~~  \frac32
1 1/2  ~~  1.5
0.\overline{3}  ~~  \frac13
1.5 \times 10^{3}  ~~  1500
2^{10}  ~~  1024
5!  ~~  120
\binom{5}{2}  ~~  10
1.2e3  ~~  1200
2^{10}=1024  ~~  1024
x = 2 + 3 = 5  ~~  5
the answer is 5  ~~  5
Answer: 5  ~~  5
=5  ~~  5
# expressions
2x+1  ~~  1+2x
(x+1)^2  ~~  x^2+2x+1
\sqrt{8}  ~~  2\sqrt2
\frac{1}{\sqrt2}  ~~  \frac{\sqrt2}{2}
\ln 9  ~~  2\ln 3
\sin^2 x  ~~  1-\cos^2 x
3+4i  ~~  4i+3
e^{i\pi}  ~~  -1
4\sqrt{3}\pi  ~~  4\pi\sqrt3
# units
5\text{ cm}  ~~  5
5  ~~  5\text{ cm}
5 cm  ~~  5\text{ centimeters}
5\mathrm{cm}  ~~  5\,\text{cm}
12\text{ square units}  ~~  12
12 cm^2  ~~  12\text{ square cm}
12\text{ cm}^2  ~~  12
7 apples  ~~  7
60\text{ mph}  ~~  60\text{ miles per hour}
9.8\text{ m/s}^2  ~~  9.8
3\text{ feet}  ~~  3 ft
5\text{ m}  ~~  5
5~\text{kg}  ~~  5
2\text{ hours}  ~~  120\text{ minutes}
1\text{ m}  ~~  100\text{ cm}
\frac{1}{2}\text{ mile}  ~~  \frac12
2\pi\text{ cm}  ~~  2\pi
10^3\text{ m}  ~~  1000
16 \text{ ways}  ~~  16
# money
\$5  ~~  5
\$5  ~~  5\text{ dollars}
$5$  ~~  \$5
$5  ~~  5
5 dollars  ~~  \$5.00
\$1,000  ~~  1000
\$2.5\text{ million}  ~~  2500000
50\text{ cents}  ~~  \$0.50
€5  ~~  5
3 million  ~~  3000000
# percent
5\%  ~~  5
5%  ~~  0.05
5  ~~  5\%
0.05  ~~  5\%
5 percent  ~~  5\%
\frac{1}{20}  ~~  5\%
# degrees
45^\circ  ~~  45
45^{\circ}  ~~  45^\circ
45°  ~~  45
45\degree  ~~  45
45 degrees  ~~  45^\circ
45  ~~  45^\circ
45\text{ degrees}  ~~  45
\sin 30^\circ  ~~  \frac12
\angle A = 45^\circ  ~~  45
20^\circ\text{C}  ~~  20
\tan 45^{\circ}  ~~  1
# ordered
(1, 2)  ~~  (1,2)
\left(1,2\right)  ~~  (1,2)
(x,y)=(1,2)  ~~  (1,2)
P=(1,2)  ~~  (1,2)
(0.5,\frac{2}{4})  ~~  (\frac12,\frac12)
x=1, y=2  ~~  (1,2)
\langle 1,2\rangle  ~~  (1,2)
(1,2);(3,4)  ~~  (3,4),(1,2)
(1,2)\text{ and }(3,4)  ~~  (1,2),(3,4)
\bigl(1,2\bigr)  ~~  (1,2)
y=2, x=1  ~~  x=1,y=2
((1,2),(3,4))  ~~  ((1,2),(3,4))
1:2  ~~  1 : 2
1:2  ~~  \frac12
# unordered
\{2,1\}  ~~  \{1,2\}
1,2  ~~  \{2,1\}
1 \text{ and } 2  ~~  2, 1
x=1\text{ or }x=2  ~~  2,1
x = 1, 2  ~~  1,2
1, 2, \text{ and } 3  ~~  1,2,3
\{5\}  ~~  5
x\in\{1,2\}  ~~  1,2
\emptyset  ~~  \{\}
\pm 2  ~~  2,-2
x=\pm2  ~~  \pm 2
1\pm\sqrt2  ~~  1+\sqrt2, 1-\sqrt2
\{\pm1, 0\}  ~~  -1,0,1
\varnothing  ~~  \emptyset
x_1=1, x_2=2  ~~  x_1=1,x_2=2
\pm i\sqrt 2  ~~  i\sqrt2,-i\sqrt2
# regions
x>3  ~~  (3,\infty)
3<x  ~~  x>3
x\geq3  ~~  [3,\infty)
1<x\le2  ~~  (1,2]
[1,2]  ~~  1\le x\le 2
x\in(1,2)  ~~  (1,2)
(-\infty,1)\cup(2,\infty)  ~~  x<1\text{ or }x>2
x > 2 or x < 1  ~~  (-\infty,1)\cup(2,\infty)
x>1\text{ and }x<2  ~~  (1,2)
|x|<2  ~~  (-2,2)
\{x\mid x>2\}  ~~  (2,\infty)
x\ne3  ~~  (-\infty,3)\cup(3,\infty)
\mathbb{R}  ~~  (-\infty,\infty)
(2,3)\cup(0,1)  ~~  (0,1)\cup(2,3)
2\ge x\ge1  ~~  [1,2]
(1,+\infty)  ~~  (1,\infty)
\mathbb{R}\setminus\{3\}  ~~  x\neq 3
[0,1)\cup\{2\}  ~~  \{2\}\cup[0,1)
a<b<c  ~~  c>b>a
x ≤ 3  ~~  x\le3
k\in[1,2]  ~~  [1,2]
(-\infty,1] U [2,\infty)  ~~  (-\infty,1]\cup[2,\infty)
x\in\mathbb{R}  ~~  \mathbb{R}
# matrices
\begin{bmatrix}1&2\\3&4\end{bmatrix}  ~~  \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\left(\begin{array}{cc}1&2\\3&4\end{array}\right)  ~~  \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}0.5\\1\end{pmatrix}  ~~  \begin{pmatrix}\frac12\\1\end{pmatrix}
\begin{pmatrix}1&2\\3&4\\\end{pmatrix}  ~~  \begin{pmatrix}1&2\\3&4\end{pmatrix}
A=\begin{pmatrix}1\\2\end{pmatrix}  ~~  \begin{pmatrix}1\\2\end{pmatrix}
# equations
y=2x+1  ~~  2x+1
2x+1  ~~  y=2x+1
2x-y+1=0  ~~  y=2x+1
2y=4x+2  ~~  y=2x+1
f(x)=x^2  ~~  y=x^2
x^2+y^2=4  ~~  4=x^2+y^2
\frac{x}{2}+\frac{y}{3}=1  ~~  3x+2y=6
f^{-1}(x)=x  ~~  x
\text{Area}=5  ~~  5
x^2+y^2-2x=0  ~~  (x-1)^2+y^2=1
S_n = n^2  ~~  n^2
AB=5  ~~  5
f(x,y)=xy  ~~  xy
\alpha=5  ~~  5
\sqrt{2}\approx1.414  ~~  \sqrt2
m\angle ABC=30^\circ  ~~  30
# bases
204_{5}  ~~  204_5
(204)_5  ~~  204_5
204_{\text{five}}  ~~  204_5
54  ~~  204_5
54_{10}  ~~  54
# times
3:30\text{ p.m.}  ~~  3:30 PM
3:30 pm  ~~  3:30\text{ PM}
03:30  ~~  3:30
3:30  ~~  3:30\text{ PM}
\text{4 July}  ~~  July 4
July 4th  ~~  \text{July }4
# choices
(B)  ~~  B
\text{B}  ~~  B
\textbf{(B)}  ~~  \text{(B)}
b  ~~  B
B.  ~~  B
B) 12  ~~  B
B: blue  ~~  B
\text{Option B}  ~~  B
(B)\ 5  ~~  (B)
# ordinals
3rd  ~~  3
3^{\text{rd}}  ~~  3
3\text{rd}  ~~  3
3^{rd}  ~~  3^{\text{rd}}
# words
yes  ~~  \text{Yes}
YES.  ~~  Yes
\text{a circle}  ~~  circle
\text{no solutions}  ~~  No solution
\text{even}  ~~  even
\mathrm{No}  ~~  no
\text{New York}  ~~  New  York
\text{True}  ~~  true
\text{odd number}  ~~  Odd Number
DNE  ~~  does not exist
\text{Red, Blue}  ~~  \text{red, blue}
# layout
\left.7\right.  ~~  7
**7**  ~~  7
`7`  ~~  7
\implies 7  ~~  7
7\,\blacksquare  ~~  7
\begin{aligned}x&=7\end{aligned}  ~~  7
\begin{cases} x=1 \\ y=2 \end{cases}  ~~  (1,2)
\left\{\begin{array}{l}x=1\\y=2\end{array}\right.  ~~  (1,2)
7 \over 12  ~~  \frac{7}{12}
+/-3  ~~  \pm 3
1.5 x 10^8  ~~  1.5\times10^8
1.5\mathrm{E}8  ~~  150000000
3{:}45  ~~  3:45
x>=5  ~~  x \geq 5
x<=5  ~~  x\le5
x != 5  ~~  x\neq 5
# what is said around the answer
\text{Total: } 7  ~~  7
Total: 7  ~~  7
\text{The line is } y = 2x+1  ~~  y=2x+1
\text{Tom makes } \$18  ~~  18
# more numbers and functions
P(5,2)  ~~  20
{}_5P_2  ~~  20
C_{10}^{3}  ~~  120
2\operatorname{cis}(60^\circ)  ~~  1+\sqrt{3}i
\surd 5  ~~  \sqrt5
\phi(n)  ~~  \varphi(n)
\frac{(2n)!}{n!\,n!}  ~~  \binom{2n}{n}
# more units
10\text{ m s}^{-1}  ~~  10\text{ m/s}
9.8\,\text{m}\cdot\text{s}^{-2}  ~~  9.8\text{ m/s}^2
9.8\,\frac{\text{m}}{\text{s}^2}  ~~  9.8\text{ m/s}^2
\$10/\text{hour}  ~~  10
1000\text{ mL}  ~~  1\text{ liter}
10000\text{ cm}^2  ~~  1\text{ m}^2
2\text{ years}  ~~  24\text{ months}
5\text{ square units}  ~~  5\text{ cm}^2
2\text{ hours }30\text{ minutes}  ~~  2.5\text{ hours}
5 feet 6 inches  ~~  5.5 feet
2\text{ hours and }30\text{ minutes}  ~~  150
\text{Rs. } 450  ~~  450\text{ rupees}
3\,\Omega  ~~  3\text{ ohms}
5\text{ (cm)}  ~~  5\text{ cm}
240\text{ different ways}  ~~  240\text{ ways}
50 \text{ per cent}  ~~  50\%
5\text{ more}  ~~  5
90^o  ~~  90^\circ
22^\circ 30'  ~~  22.5^\circ
# more points, matrices and sets
P(2,6)  ~~  (2,6)
(1,2)\quad (3,4)  ~~  (1,2),(3,4)
\{(1,2)\}  ~~  (1,2)
(1,0)^T  ~~  \begin{pmatrix}1\\0\end{pmatrix}
\begin{pmatrix}1&0\end{pmatrix}^{\top}  ~~  \begin{pmatrix}1\\0\end{pmatrix}
[[1,2],[3,4]]  ~~  \begin{pmatrix}1&2\\3&4\end{pmatrix}
\frac{1}{2}\begin{pmatrix}1&2\\3&4\end{pmatrix}  ~~  \begin{pmatrix}\frac12&1\\\frac32&2\end{pmatrix}
-\begin{psmallmatrix}1&2\\3&4\end{psmallmatrix}  ~~  \begin{pmatrix}-1&-2\\-3&-4\end{pmatrix}
]0,1[  ~~  (0,1)
]-\infty,1[\cup]2,\infty[  ~~  (-\infty,1)\cup(2,\infty)
[0,1]\setminus\{0\}  ~~  (0,1]
\text{All real numbers}  ~~  \mathbb{R}
\mathbf{R}  ~~  \mathbb{R}
\text{empty set}  ~~  \emptyset
1,2,3,...  ~~  1,2,3,\ldots
# more equations and residues
a = b = c  ~~  c=b=a
\sin\theta=\frac35  ~~  \frac35
P(A\cap B)=\frac13  ~~  \frac13
u(x,t)=\sin(x-ct)  ~~  u = \sin(x-ct)
\mathbf{v}=\begin{pmatrix}1\\0\end{pmatrix}  ~~  \begin{pmatrix}1\\0\end{pmatrix}
3 \pmod 7  ~~  3
x\equiv 3\pmod{7}  ~~  x \equiv 3 \pmod 7
x\equiv 10\ (\text{mod } 7)  ~~  x \equiv 3 \pmod 7
\mathbb{Z}/6\mathbb{Z}  ~~  \mathbb{Z}_6
17 \mod 5  ~~  2
x \equiv 3 \mod 7  ~~  x\equiv 3\pmod 7
\frac{dy}{dx}=2x  ~~  2x
\mathbb{E}[X]=\frac12  ~~  \frac12
\mathbb{R}^+  ~~  (0,\infty)
6\text{ cm and }8\text{ cm}  ~~  6\text{ cm}, 8\text{ cm}
3\text{ to }4  ~~  3:4
10110_{\text{base }2}  ~~  10110_2
10110 \text{ (base 2)}  ~~  10110_2
5\text{ PM}  ~~  5:00\text{ p.m.}
\lim_{x\to 0^+} f(x) = 7  ~~  7
\int_0^{1/2} (x+1)\,dx = \frac58  ~~  \frac58
[1,2;3,4]  ~~  \begin{pmatrix}1&2\\3&4\end{pmatrix}
\boldsymbol{(-\sqrt{3}, 3)}  ~~  (-\sqrt3,3)
\color{blue}{\frac12, \frac13}  ~~  \frac12,\frac13
# more times, words and choices
\text{Oct. 30}  ~~  \text{October 30}
\text{noon}  ~~  12:00\text{ PM}
5\text{ p.m.}  ~~  5:00\text{ p.m.}
\text{True}, \text{False}  ~~  \text{True, False}
\text{``MATH''}  ~~  \text{MATH}
(E) \text{not enough information}  ~~  E
\text{(C)}\ f(x)=2  ~~  C
(B)\ -5  ~~  B
\textbf{(B)}\ \sqrt{2}  ~~  B
"""

WRONG = r"""
# numbers
9007199254740993  ~~  9007199254740992
1.0000001  ~~  1
3.14  ~~  \pi
0.333  ~~  \frac13
1e-9  ~~  0
1.234  ~~  1234
12  ~~  1,2
-5  ~~  5
500,58  ~~  58,500
-2\frac14  ~~  -\frac74
2,001  ~~  2
0/0  ~~  0
\frac{1}{0}  ~~  \infty
1 or 2  ~~  1
1,2  ~~  1
a=b=5  ~~  4
5=6  ~~  6
2+3=6  ~~  6
x  ~~  5
5x  ~~  5
\sqrt[3]{5}  ~~  \sqrt5
2^{1000}+1  ~~  2^{1000}
\text{five 5}  ~~  5
# units
5\text{ cm}  ~~  5\text{ m}
5\text{ days}  ~~  5\text{ weeks}
5 feet  ~~  5\text{ inches}
5 cm  ~~  6 cm
5\text{ cm}^2  ~~  5\text{ cm}
-20\text{ days}  ~~  20\text{ days}
5\text{ apples}  ~~  5\text{ pears}
60\text{ mph}  ~~  60\text{ km/h}
5\text{ or more}  ~~  5
5\text{ less than } x  ~~  5
\$5  ~~  5\text{ cents}
5i  ~~  5
5\mathrm{i}  ~~  5
5m  ~~  5
5\text{ million}  ~~  5
# percent
5\%  ~~  500
0.05\%  ~~  5\%
5\%  ~~  6\%
5\%  ~~  5\text{ cm}
# degrees
45^\circ  ~~  46^\circ
\sin 30^\circ  ~~  \sin 30
45^\circ  ~~  \frac{1}{4}
# ordered
(2,1)  ~~  (1,2)
(1,2)  ~~  [1,2]
(1,2,3)  ~~  (1,2)
(1,2)  ~~  (1,2),(3,4)
1:2  ~~  2:1
x=2,y=1  ~~  (1,2)
x=1,y=2  ~~  x=2,y=1
(20,100)  ~~  20100
(20,100]  ~~  (20,100)
(1,2)  ~~  12
# unordered
1,2  ~~  1,2,3
1,2,2  ~~  1,1,2
1,2,3  ~~  1,2
\pm2  ~~  2
2  ~~  \pm2
\pm3  ~~  \pm2
\emptyset  ~~  0
\{0\}  ~~  \emptyset
1\pm\sqrt2  ~~  1+\sqrt2
\{1,2\}  ~~  (1,2)
x=1,y=2  ~~  x=1,x=2
# regions
x\ge3  ~~  (3,\infty)
x<3  ~~  (3,\infty)
x<1\text{ and }x>2  ~~  x<1\text{ or }x>2
(1,2)  ~~  [1,2)
(0,1)\cup(2,3)  ~~  (0,1)\cup(2,4)
(0,1)  ~~  (0,1)\cup(2,3)
x>3  ~~  3
3  ~~  x>3
x>3  ~~  y>3
a<b<c  ~~  a<c<b
a<b  ~~  a\le b
|x|>2  ~~  (-2,2)
x\ne3  ~~  3
x\ne3  ~~  x=3
\mathbb{R}  ~~  (0,\infty)
# matrices
\begin{pmatrix}1&2\\3&5\end{pmatrix}  ~~  \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&2\end{pmatrix}  ~~  \begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix}  ~~  \begin{pmatrix}1&3\\2&4\end{pmatrix}
1,2,3,4  ~~  \begin{pmatrix}1&2\\3&4\end{pmatrix}
# equations
y=2x+2  ~~  y=2x+1
0  ~~  x+y=0
x+y=0  ~~  0
x=5  ~~  y=5
0=0  ~~  x=1
x^2+y^2=4  ~~  x^2+y^2=2
x=1  ~~  2
xy=6  ~~  6
x=x  ~~  5
5=  ~~  5
2x=10  ~~  10
y=x  ~~  x=1
B  ~~  A = B
# bases
204_6  ~~  204_5
2041_5  ~~  204_{15}
205_5  ~~  204_5
24_{11}  ~~  24_{10}
# times
3:30\text{ AM}  ~~  3:30\text{ PM}
3:31  ~~  3:30
12:00  ~~  1:00
\text{July 5}  ~~  \text{July 4}
# choices
A  ~~  B
\text{A and B}  ~~  A
A, B  ~~  A
(A) or (B)  ~~  A
Apple  ~~  A
AB  ~~  A
A+B  ~~  A
# ordinals
4th  ~~  3
3rd  ~~  4^{\text{th}}
# words
no  ~~  yes
\text{Monday}  ~~  Friday
\text{not even}  ~~  even
-\text{even}  ~~  even
True  ~~  False
ground_truth  ~~  5
\text{infinite}  ~~  5
__import__('os')  ~~  1
exec('x=1')  ~~  1
lambda: 0  ~~  0
# more of what is close
\infty-\infty  ~~  0
|x+30|  ~~  x+30
|x-100|  ~~  100-x
\lfloor m/2\rfloor+\lfloor m/2\rfloor  ~~  \lfloor m/2\rfloor+\lfloor n/2\rfloor
\frac{2}{1-(-1)^n}  ~~  \frac{1-(-1)^n}{2}
\phi(n)  ~~  n\phi
\Phi(2)+\Phi(3)  ~~  \Phi(2)-\Phi(-3)
P(x)+P(y)  ~~  P(x+y)
\tan+1 x  ~~  \tan x
0x10  ~~  0
VI  ~~  IV
1,2,3,...  ~~  1,2,3
y = -\frac{47}{0}  ~~  y = -\frac{47}{8}
255_2  ~~  255
N(0,1)  ~~  (0,1)
P(2,6)  ~~  (6,2)
[0,1]\setminus\{0\}  ~~  [0,1]
]0,1]  ~~  (0,1)
x>2, x\in\mathbb{Z}  ~~  x>2
\{\{1\},\{2\}\}  ~~  \{1,2\}
-\begin{pmatrix}1&2\\3&4\end{pmatrix}  ~~  \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{cases} x=2 \\ y=1 \end{cases}  ~~  (1,2)
[[1,3],[2,4]]  ~~  \begin{pmatrix}1&2\\3&4\end{pmatrix}
(y,x)=(1,2)  ~~  (1,2)
AC  ~~  AB = AC
f(x)  ~~  f'(x)=f(x)
x\equiv 4 \pmod{7}  ~~  x \equiv 3 \pmod 7
3 \pmod 7  ~~  3 \pmod 8
x>=5  ~~  x>5
5!=120  ~~  5
5\hspace{1cm}6  ~~  56
5 \bmod 3  ~~  5
10 \pmod 7  ~~  10
(x,y)=(1,2)  ~~  (y,x)=(1,2)
10110 base 3  ~~  10110_2
5 pm  ~~  5:00\text{ a.m.}
\mathbb{R}^+  ~~  \mathbb{R}
f(x)=x  ~~  f(y)=x
\sum a_n + 3 = 7  ~~  7
\gcd(a,b)\cdot 2 = 7  ~~  7
[1,2;3,4]  ~~  [1,2,3,4]
\begin{pmatrix}\end{pmatrix}  ~~  (1,2)
\text{True, False}  ~~  \text{False, True}
T, F, T  ~~  T, T, F
# words that are no unit
2 squared  ~~  2
2\text{ thirds}  ~~  2
2\text{ pi}  ~~  2
5\text{ wrong}  ~~  5
5 xyz  ~~  5
5\text{ hundred}  ~~  5
5\text{ degrees below zero}  ~~  5
5\text{ less}  ~~  5\text{ more}
5\text{ square units}  ~~  5\text{ cubic units}
100\text{ cm}^2  ~~  1\text{ m}^2
2\text{ hours }30\text{ minutes}  ~~  2.3\text{ hours}
5\text{ apples }3\text{ pears}  ~~  8
5! \text{ ways}  ~~  5\text{ ways}
1:5 \text{ hours}  ~~  1.5\text{ hours}
(3,5)\text{ apples}  ~~  3,5\text{ apples}
# what takes the answer back, or leaves it open
\text{The answer is not: } 5  ~~  5
\text{at least: } 5  ~~  5
\text{Nobody has } 5  ~~  5
\text{Half is } 5  ~~  5
Error: 5  ~~  5
\text{Monday: } 5  ~~  \text{Tuesday: } 5
\text{not }n=2,3,4  ~~  n=2,3,4
\text{Team A}  ~~  \text{Team}
\text{March 5 to April 6}  ~~  \text{March 6 to April 5}
(A)(B)  ~~  A
A. B.  ~~  A
\text{A. But could be B}  ~~  A
\text{(A) is wrong}  ~~  A
\text{(A)}\text{ not}  ~~  A
\text{(A)} < 1  ~~  A
(C)x  ~~  C
A.5  ~~  A
A  ~~  \text{(A) and (C)}
A  ~~  \text{(A) or (B)}
"""


def pairs(table: str) -> list[tuple[str, str]]:
    """The answers and labels of a table, one pair a line."""
    lines = [line for line in table.splitlines() if line and not line.startswith("# ")]
    return [(answer, label) for answer, _, label in (line.partition("  ~~  ") for line in lines)]


@pytest.mark.parametrize(("answer", "label"), pairs(RIGHT))
def test_right_answers(answer: str, label: str) -> None:
    assert same(answer, label)


@pytest.mark.parametrize("answer", ["\u22125", "- 5", " -5", "-5\u200b", "\uff0d\uff15", "\u20135"])
def test_characters_of_other_alphabets(answer: str) -> None:
    assert same(answer, "-5")


@pytest.mark.parametrize(("answer", "label"), pairs(WRONG))
def test_wrong_answers(answer: str, label: str) -> None:
    assert not same(answer, label)


def test_long_sums_of_numbers_are_computed() -> None:
    ones = "+".join("1" for _ in range(20_000))
    halves = "".join("+\\frac{1}{2}" for _ in range(2_000))
    assert same(ones, "20000")
    assert not same(ones, "19999")
    assert same(f"1{halves}", "1001")
    assert not same(f"{ones}+\\frac{{1}}{{0}}", "20000")
    assert not same(f"{ones}+", "20000")


def test_nothing_is_no_answer_and_no_label() -> None:
    assert not same("5", "")
    assert not same("", "5")


EVERY = sorted({text for pair in pairs(RIGHT + WRONG) for text in pair})


@pytest.mark.parametrize("text", EVERY)
def test_everything_is_equal_to_itself_and_restyled(text: str) -> None:
    assert same(text, text)
    for restyled in restylings(text):
        assert same(restyled, text), restyled


def restylings(text: str) -> list[str]:
    """Other ways to write the same answer."""
    styles = [f" {text} ", f"{text}.", f"${text}$" if "$" not in text else text, f"\\displaystyle {text}"]
    styles += [text.replace("\\frac{", "\\dfrac{"), text.replace(", ", ",\\,"), text.replace(" ", "  ")]
    return styles + ([] if "\\(" in text else [text.replace("(", "\\left(").replace(")", "\\right)")])


@pytest.mark.parametrize(("answer", "label"), pairs(RIGHT + WRONG))
def test_answer_and_label_may_be_exchanged(answer: str, label: str) -> None:
    one_sided = is_choice(clean(label)) or is_grouped(answer) != is_grouped(label)
    if answer and label and not one_sided:
        assert same(label, answer) == same(answer, label)


MACROS = r"""
\frac \sqrt \{ \} \cup \pm \text{ \le \in \infty ^\circ \begin{pmatrix} \end{pmatrix} & \\ \sin \left \ne \dots \$ \%
"""
PIECES = st.sampled_from(
    [*"0123456789xyzABei+-*/^=<>()[]{}|,.;:!_%$ ", *MACROS.split(), " or ", " and ", "\\text{ cm}"]
)
TEXTS = st.lists(PIECES, max_size=14).map("".join)


@given(TEXTS, TEXTS)
def test_any_two_texts_can_be_compared(answer: str, label: str) -> None:
    assert same(answer, label) in (True, False)


@given(TEXTS)
def test_every_text_that_says_something_is_equal_to_itself(text: str) -> None:
    assert same(text, text) == bool(text.strip())


# ------------------------------------------------------------------------------------------------------- the whole rule


def grade(response: str, label: str, require_think: bool = True) -> Graded:
    draft = rule.grade_cheaply(Item(response, label, require_think=require_think))
    return rule.decide(draft) if isinstance(draft, Question) else draft


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("</think>\\boxed{4}", Reason.CORRECT),
        ("\\boxed{5}</think>\\boxed{4}", Reason.CORRECT),
        ("</think>\\boxed{5} or rather \\boxed{4}", Reason.CORRECT),
        ("</think>\\boxed{4} or rather \\boxed{5}", Reason.WRONG),
        ("</think>\\boxed 4", Reason.CORRECT),
        ("</think>$\\boxed 4$ is it", Reason.CORRECT),
        ("</think>\\boxed 4 is it", Reason.CORRECT),
        ("</think>$\\boxed 4!$", Reason.WRONG),
        ("</think>$\\boxed 4 + 1$", Reason.WRONG),
        ("</think>\\boxed {4}", Reason.CORRECT),
        ("</think>\\fbox{4}", Reason.CORRECT),
        ("</think>#### 4", Reason.CORRECT),
        ("</think>\\boxed{\\boxed{4}}", Reason.CORRECT),
        ("</think>\\boxed{4", Reason.NO_ANSWER),
        ("</think>\\boxed{4} \\boxed{", Reason.NO_ANSWER),
        ("</think>\\boxed{}", Reason.NO_ANSWER),
        ("</think>4", Reason.NO_ANSWER),
        ("\\boxed{4}</think>", Reason.NO_ANSWER),
        ("\\boxed{4}", Reason.NO_THINK_TAG),
        ("<think>\\boxed{4}", Reason.NO_THINK_TAG),
    ],
)
def test_where_the_answer_is(response: str, reason: Reason) -> None:
    assert grade(response, "4") == Graded(Verdict.SCORED, reason)


def test_without_required_thinking_unfinished_thinking_still_holds_no_answer() -> None:
    assert grade("\\boxed{4}", "4", require_think=False).reason is Reason.CORRECT
    assert grade("<think>\\boxed{4}", "4", require_think=False).reason is Reason.NO_THINK_TAG


@pytest.mark.parametrize("label", ["", " ", "\\boxed{}", "\\boxed{4"])
def test_a_label_that_says_nothing_is_ungradable(label: str) -> None:
    assert grade("</think>\\boxed{4}", label) == Graded(Verdict.UNGRADABLE)


def test_a_label_may_stand_in_a_box() -> None:
    assert grade("</think>\\boxed{4}", "\\boxed{4}").reason is Reason.CORRECT
