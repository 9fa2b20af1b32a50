"""What a reader sees of an article: small pieces of markup as Wikipedia had it in 2006."""

import time

import pytest

from mgk.data.wiki_markup import FORMULA, Heading, Paragraph, blocks


def text(source):
    """The only paragraph."""
    (block,) = blocks(source)
    assert isinstance(block, Paragraph)
    return block.text


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("'''Bold''' and ''italic'' and '''''both'''''", "Bold and italic and both"),
        ("[[etymology|derived from]] the [[Greek]]s", "derived from the Greeks"),
        ("the [[working_class]] of [[Paris#History]]", "the working class of Paris"),
        ("[[a|b|c]] d", "b|c d"),
        ("see [http://a.org/x?y=1 their page] and [http://b.org] or http://c.org/d.", "see their page and or"),
        ("[[:Category:Birds]] and [[Wiktionary:bird|bird]]", "Category:Birds and bird"),
        ("A[[Image:x.jpg|thumb|A [[red]] bird on [http://a.org a site]]] bird", "A bird"),
        ("bird[[Category:Birds]][[de:Vogel]][[zh-min-nan:Ciau]]", "bird"),
        ("H<sub>2</sub>O is <b>wet</b><ref>So ''they'' {{cite|x}} say</ref>.<ref name=a/>", "H2O is wet."),
        ("before<!-- a {{ comment\n\n-->, after", "before, after"),
        ("cut <!-- to the end", "cut"),
        ("five&nbsp;km &amp;mdash; &quot;so&quot; &lt;x&gt; &#945;&amp;#946;", 'five km — "so" <x> αβ'),
        ("soft\u00adhyphen", "softhyphen"),
        ("where <math>x^2</math> is", f"where {FORMULA} is"),
        ("{{Infobox|a={{b|{{c}}}}|d=[[e|f]]}}It is {{fact}} so", "It is so"),
        ("{{a\n{|\n| {{b}} || c\n|}\n}}It is", "It is"),
        ("{{lang|fr|été}} in {{IPA|/ete/}} and {{lang-de|Sommer}}", "été in /ete/ and Sommer"),
        ("Hawai{{okina}}i", "Hawai\u02bbi"),
        ("a name ({{lang}}) of ({{x}}, born 1900)", "a name of (born 1900)"),
        ("__NOTOC__ yes ~~~~", "yes"),
        ("an {{unclosed template, [[and link", "an unclosed template, and link"),
        ("[[Image:x.jpg]] [http://a.org of [[b]]]{{c}} d", "of b d"),
        ("closed }} too ]] often", "closed too often"),
    ],
)
def test_inline(source, shown):
    assert text(source) == shown


def test_a_forgotten_end_does_not_swallow_paragraphs():
    found = blocks("one [[link, two.\n\nthree [[four]] five]] six.")
    assert [block.text for block in found] == ["one link, two.", "three four five six."]


def test_tables():
    source = (
        'Before.\n{| class="x"\n! head\n|-\n| a || b\n{|\n| deep\n|}\n| c\n|}\nBetween.\n'
        "<table><tr><td>x<table><tr><td>y</td></tr></table></td></tr></table>After.\n|- left over\n!left over"
    )
    assert [block.text for block in blocks(source)] == ["Before.", "Between.", "After."]


def test_lines():
    """Lines of a paragraph are one, list items are each their own, what starts with a space is no text."""
    source = (
        "One\nline.\n\nAnother<br>broken.\n* first [[a]]\n** ''second''\n#[[b|c]], [[d]]\n#[[b|c]]\n: indented\n"
        " program(x);\n----\n''See also: [[x]]''\n:''For other uses, see [[y]].''\n\n"
        "==  History ==\n=== Of ''it'' ===\nLast."
    )
    assert blocks(source) == [
        Paragraph("One line."), Paragraph("Another"), Paragraph("broken."), Paragraph("first a", is_item=True),
        Paragraph("second", is_item=True), Paragraph("c, d", is_item=True, is_link=True),
        Paragraph("c", is_item=True, is_link=True), Paragraph("indented", is_item=True), Heading(2, "History"),
        Heading(3, "Of it"), Paragraph("Last."),
    ]  # fmt: skip


def test_what_is_gone_leaves_no_preformatted_line():
    found = blocks("{{box}} ''One'' is.\n{{x}} Two is.\n int main;\n {|\n| x\n |}\nEnd.")
    assert [block.text for block in found] == ["One is. Two is.", "End."]


@pytest.mark.parametrize(
    "piece", ["{{", "[[", "{|\n", "<!--", "<ref>", "<table>", "[http://a ", "'''", "}}", "((", "<a ", "="]
)
def test_marks_that_nobody_closes(piece):
    """They stand for nothing, and a search from each to the end takes no minutes."""
    source = "Start. " + piece * 1_000
    start = time.process_time()
    assert blocks(source)[0].text.startswith("Start.")
    assert time.process_time() - start < 5
