//! Chat templates: Jinja programs of other people, run with limits.

use std::{collections::BTreeMap, fs, path::Path, time::SystemTime};

use minijinja::{Environment, Value, context, escape_formatter, syntax::SyntaxConfig, value::ValueKind};
use numcore::{Error, Result};

use super::python;
use crate::files::JsonObject;

/// How many instructions a template may take: the longest real ones take some thousands a message.
const FUEL: u64 = 5_000_000;
/// The longest text a template may give, in bytes.
const MAX_TEXT: usize = 64 << 20;
/// The longest template, in bytes.
const MAX_TEMPLATE: usize = 1 << 20;

/// What was said, and what may be called: the rows of chat files.
#[derive(Clone, Debug)]
pub struct Conversation {
    messages: Vec<Value>,
    tools: Value,
}

impl Conversation {
    /// No messages.
    pub fn new() -> Self {
        Conversation { messages: Vec::new(), tools: Value::from(()) }
    }

    /// Reads a row, `{"messages": [{"role": …, "content": …}, …]}`, with `tools` if it has some.
    ///
    /// # Errors
    /// If it is no JSON, or has no list of messages with roles.
    pub fn from_json(row: &str) -> Result<Self> {
        let wrong = |why: String| Error::format("a conversation", why);
        let row: Value = serde_json::from_str(row).map_err(|e| wrong(format!("it is no JSON: {e}")))?;
        let list = row.get_attr("messages").ok().filter(|list| list.kind() == ValueKind::Seq);
        let messages = list.and_then(|list| Some(list.try_iter().ok()?.collect::<Vec<_>>()));
        let Some(messages) = messages else { return Err(wrong("it has no list `messages`".into())) };
        let has_role = |m: &Value| m.get_attr("role").is_ok_and(|role| role.as_str().is_some());
        if let Some(at) = messages.iter().position(|m| !has_role(m)) {
            return Err(wrong(format!("message {at} has no `role`")));
        }
        let tools = row.get_attr("tools").ok().filter(|t| !t.is_undefined()).unwrap_or_else(|| Value::from(()));
        Ok(Conversation { messages, tools })
    }

    /// This conversation with one message more.
    pub fn with(mut self, role: &str, content: &str) -> Self {
        self.messages.push(context! { role => role, content => content });
        self
    }

    /// How many messages there are.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether nothing was said.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Whether a message is the assistant's.
    pub(super) fn is_assistant(&self, at: usize) -> bool {
        self.messages[at].get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
    }

    /// The first messages.
    pub(super) fn first(&self, count: usize) -> Conversation {
        Conversation { messages: self.messages[..count].to_vec(), tools: self.tools.clone() }
    }
}

impl Default for Conversation {
    fn default() -> Self {
        Self::new()
    }
}

/// A day, for templates that tell it to the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatDate {
    /// The year.
    pub year: i64,
    /// The month, from 1.
    pub month: u32,
    /// The day of the month, from 1.
    pub day: u32,
}

/// A model's chat template. It is a program of other people: it can read nothing but the conversation, and is stopped when it takes too many
/// instructions, recurses too deeply, or writes too much. (Strings that it doubles within an expression are bounded by the instructions alone.)
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The special tokens that templates may name, such as `bos_token`.
    tokens: BTreeMap<&'static str, String>,
}

/// The names of special tokens.
const TOKENS: [&str; 7] = ["bos_token", "cls_token", "eos_token", "mask_token", "pad_token", "sep_token", "unk_token"];

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// The template in a folder: `chat_template.jinja`, or what `tokenizer_config.json` has; and the special tokens
    /// that are named there.
    ///
    /// # Errors
    /// If there is none, or it is malformed.
    pub fn of_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let (folder, path) = (folder.as_ref(), folder.as_ref().join("chat_template.jinja"));
        let config = JsonObject::open(&folder.join("tokenizer_config.json"))?;
        let token = |name: &'static str| {
            let value = config.get(name)?;
            let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
            Some((name, text.to_owned()))
        };
        let source = match path.is_file() {
            true => fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?,
            false => in_config(&config)?,
        };
        Self::with_tokens(&source, TOKENS.into_iter().filter_map(token).collect())
    }

    /// A template, and the tokens that begin and end a text.
    ///
    /// # Errors
    /// If it is no Jinja, or longer than templates are.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self> {
        Self::with_tokens(source, [("bos_token", bos.into()), ("eos_token", eos.into())].into())
    }

    fn with_tokens(source: &str, tokens: BTreeMap<&'static str, String>) -> Result<Self> {
        if source.len() > MAX_TEMPLATE {
            return Err(Error::format("a chat template", format!("it has {} bytes", source.len())));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(broken)?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(100);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, state, value| match value.kind() {
            ValueKind::Number => out.write_str(&python::text(value)).map_err(minijinja::Error::from),
            _ => escape_formatter(out, state, value),
        });
        environment.add_filter(
            "string",
            |value: Value| if value.as_str().is_some() { value } else { python::text(&value).into() },
        );
        environment.add_filter("tojson", python::to_json);
        environment.add_function("raise_exception", python::raise_exception);
        environment.add_template_owned(NAME, without_generation(source)).map_err(broken)?;
        let template = ChatTemplate { environment, tokens };
        Ok(template.with_date(today()))
    }

    /// This template with a day of one's own, so that its text does not depend on when it is made.
    pub fn with_date(mut self, date: ChatDate) -> Self {
        self.environment.add_function("strftime_now", move |format: String| python::strftime(date, &format));
        self
    }

    /// The text of a conversation; with `prompt`, also what begins an answer.
    ///
    /// # Errors
    /// If the template refuses the conversation (roles that do not alternate, say), fails, or reaches a limit.
    pub fn render(&self, conversation: &Conversation, prompt: bool) -> Result<String> {
        let template = self.environment.get_template(NAME).map_err(broken)?;
        let tools = &conversation.tools;
        let context = context! {
            messages => conversation.messages.clone(), tools => tools, documents => (), add_generation_prompt => prompt,
            ..Value::from_pairs(self.tokens.iter().map(|(name, token)| (*name, token.as_str())))
        };
        let mut text = Bounded(Vec::new());
        template.render_captured_to(context, &mut text).map_err(broken)?;
        String::from_utf8(text.0).map_err(Error::other)
    }
}

/// Memory for a text, up to a limit.
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_TEXT {
            return Err(std::io::Error::other(format!("the text is longer than {MAX_TEXT} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn broken(e: minijinja::Error) -> Error {
    use std::error::Error as _;
    let why = match e.kind() {
        minijinja::ErrorKind::OutOfFuel => format!("it takes more than {FUEL} instructions: it may never end"),
        _ => match e.source() {
            Some(source) => format!("{e}: {source}"),
            None => e.to_string(),
        },
    };
    Error::format("the chat template", why)
}

/// The template of `tokenizer_config.json`: a string, or a list of named ones, of which `default` is meant.
fn in_config(config: &JsonObject) -> Result<String> {
    let default = |list: &Vec<serde_json::Value>| {
        let entry = list.iter().find(|entry| entry.get("name").is_some_and(|name| name == "default"))?;
        Some(entry.get("template")?.as_str()?.to_owned())
    };
    let found = config.get("chat_template").and_then(|v| match v {
        serde_json::Value::String(text) => Some(text.clone()),
        serde_json::Value::Array(list) => default(list),
        _ => None,
    });
    found.ok_or_else(|| {
        config.wrong("chat_template", "is missing, and there is no chat_template.jinja: it is no chat model")
    })
}

/// The template without the tag that marks an assistant's text: as a condition that holds, so that whitespace stays as it is.
fn without_generation(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let word = tag.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['}', '%', '-', '+']).trim();
        text.push_str(before);
        match word {
            "generation" => text.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => text.push_str(&tag.replace("endgeneration", "endif")),
            _ => text.push_str(tag),
        }
        rest = after;
    }
    text + rest
}

/// Today, in UTC.
fn today() -> ChatDate {
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    // Civil date of a count of days, with years that begin in March.
    let days = (seconds / 86_400) as i64 + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = (day_of_year - (153 * shifted + 2) / 5 + 1) as u32;
    let month = (if shifted < 10 { shifted + 3 } else { shifted - 9 }) as u32;
    ChatDate { year: year_of_era + era * 400 + i64::from(month <= 2), month, day }
}
