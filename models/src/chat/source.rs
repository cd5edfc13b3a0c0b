//! Adaptation of a template's source to the differences between Python's Jinja and minijinja.

/// The deepest nesting of brackets that is rewritten; the parser refuses templates with more.
const DEEPEST: usize = 200;

/// Rewrites a template. Tags that mark an assistant's text become a condition that holds, so that whitespace stays as
/// it is. The operands of `~` go through the filter `string`, which writes numbers as Python does.
pub(super) fn adapted(source: &str) -> String {
    let (mut text, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        text.push_str(before);
        let closing = match tag.as_bytes().get(1) {
            Some(b'{') => "}}",
            Some(b'%') => "%}",
            Some(b'#') => {
                let end = tag.find("#}").map_or(tag.len(), |end| end + 2);
                text.push_str(&tag[..end]);
                rest = &tag[end..];
                continue;
            }
            _ => {
                text.push('{');
                rest = &tag[1..];
                continue;
            }
        };
        let mut reader = TagReader { rest: &tag[2..], closing };
        let inside = reader.level(None, 0);
        text.push_str(&tag[..2]);
        text.push_str(&match inside.trim_start_matches(['-', '+']).trim() {
            "generation" => inside.replace("generation", "if true"),
            "endgeneration" => inside.replace("endgeneration", "endif"),
            _ => inside,
        });
        // Text between these tags is copied.
        let word = tag[2..].trim_start_matches(['-', '+']).trim_start();
        let raw = if closing == "%}" && word.starts_with("raw") { reader.rest.find("endraw") } else { None };
        let (verbatim, after) = reader.rest.split_at(raw.unwrap_or(0));
        text.push_str(verbatim);
        rest = after;
    }
    text + rest
}

/// A reader of the expressions of a tag, piece by piece.
struct TagReader<'a> {
    rest: &'a str,
    closing: &'static str,
}

/// A list of expressions that is being rewritten: pieces between operators that bind less than `~`.
#[derive(Default)]
struct Rewritten {
    done: String,
    /// The operands of `~` before the last.
    operands: Vec<String>,
    operand: String,
}

impl TagReader<'_> {
    /// Rewrites the text up to and with a closing bracket, or up to the end of the tag.
    fn level(&mut self, bracket: Option<char>, depth: usize) -> String {
        let mut text = Rewritten::default();
        loop {
            let Some(letter) = self.rest.chars().next().filter(|_| bracket.is_some() || !self.ends()) else {
                return text.finished();
            };
            let inner = [('(', ')'), ('[', ']'), ('{', '}')].into_iter().find(|(open, _)| *open == letter);
            if Some(letter) == bracket {
                return text.finished() + self.take(1);
            } else if let Some((_, close)) = inner.filter(|_| depth < DEEPEST) {
                text.operand.push_str(self.take(1));
                text.operand.push_str(&self.level(Some(close), depth + 1));
            } else if matches!(letter, '"' | '\'') {
                text.operand.push_str(self.string());
            } else if letter.is_alphanumeric() || letter == '_' {
                text.word(self.word());
            } else if letter == '~' {
                self.take(1);
                text.operands.push(std::mem::take(&mut text.operand));
            } else if matches!(letter, ',' | ':' | '=' | '!' | '<' | '>')
                || "+-".contains(letter) && !text.wants_operand()
            {
                text.separate(self.take(1));
            } else {
                text.operand.push_str(self.take(letter.len_utf8()));
            }
        }
    }

    /// Tells whether the tag ends at this place.
    fn ends(&self) -> bool {
        let trimmed = self.rest.strip_prefix(['-', '+']).unwrap_or(self.rest);
        trimmed.starts_with(self.closing) || self.rest.starts_with(self.closing)
    }

    fn take(&mut self, count: usize) -> &str {
        let (taken, rest) = self.rest.split_at(count);
        self.rest = rest;
        taken
    }

    /// A string with its quotes.
    fn string(&mut self) -> &str {
        let (mut escaped, bytes) = (false, self.rest.as_bytes());
        let end = bytes.iter().skip(1).position(|&byte| {
            let ends = byte == bytes[0] && !escaped;
            escaped = byte == b'\\' && !escaped;
            ends
        });
        self.take(end.map_or(self.rest.len(), |end| end + 2))
    }

    /// A name, or a number with its exponent.
    fn word(&mut self) -> &str {
        let is_number = self.rest.starts_with(|c: char| c.is_ascii_digit());
        let mut last = ' ';
        let end = self.rest.find(|c: char| {
            let goes_on = c.is_alphanumeric()
                || c == '_'
                || is_number && (c == '.' || "+-".contains(c) && last.eq_ignore_ascii_case(&'e'));
            last = c;
            !goes_on
        });
        self.take(end.unwrap_or(self.rest.len()))
    }
}

impl Rewritten {
    fn word(&mut self, word: &str) {
        let before = self.operand.trim_end();
        let is_test = ["is", "is not"].into_iter().filter_map(|is| before.strip_suffix(is)).any(|x| x.ends_with(' '));
        let part_of_test = before.ends_with('.') || is_test && matches!(word, "not" | "in");
        let binds_less = ["and", "or", "not", "in", "if", "elif", "else", "print", "do", "recursive"].contains(&word);
        if binds_less && !part_of_test { self.separate(word) } else { self.operand.push_str(word) }
    }

    /// Tells whether a sign belongs to a number, since no left operand is before it.
    fn wants_operand(&self) -> bool {
        let before = self.operand.trim_end();
        before.is_empty() || before.ends_with(['*', '/', '%', '('])
    }

    fn separate(&mut self, by: &str) {
        let done = std::mem::take(self).finished();
        self.done = done + by;
    }

    fn finished(self) -> String {
        let Rewritten { mut done, mut operands, operand } = self;
        if operands.is_empty() {
            return done + &operand;
        }
        operands.push(operand);
        let texts: Vec<String> = operands.iter().map(|operand| format!(" ({operand})|string ")).collect();
        done.push_str(&texts.join("~"));
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_become_texts_and_all_else_stays() {
        for (source, due) in [
            ("a ~ b {{ x }} {", "a ~ b {{ x }} {"),
            ("{{ a ~ b}}", "{{ ( a )|string ~ ( b)|string }}"),
            ("{%- set x = -a * 2 ~ 'a~\\'b' -%}", "{%- set x = ( -a * 2 )|string ~ ( 'a~\\'b' )|string -%}"),
            ("{{ a - b ~ 1e-5 + 3 }}", "{{ a - ( b )|string ~ ( 1e-5 )|string + 3 }}"),
            ("{{ f(a ~ [{'c': d ~ e}])}}", "{{ f( (a )|string ~ ( [{'c': ( d )|string ~ ( e)|string }])|string )}}"),
            (
                "{% if a is not none ~ this and not c ~ d %}",
                "{% if ( a is not none )|string ~ ( this )|string and not ( c )|string ~ ( d )|string %}",
            ),
            ("{# a ~ b #}{% raw %}{{ a ~ b }}{% endraw %}", "{# a ~ b #}{% raw %}{{ a ~ b }}{% endraw %}"),
            ("{%- generation -%}x{% endgeneration %}", "{%- if true -%}x{% endif %}"),
            ("{{ a ~ ", "{{ ( a )|string ~ ( )|string "),
        ] {
            assert_eq!(adapted(source), due);
        }
        assert!(adapted(&"{{".repeat(10_000)).len() > 10_000);
    }
}
