//! Chat templates: Jinja programs of other people, run with limits.

use std::{collections::BTreeMap, fs, path::Path, time::SystemTime};

use data::gguf::GgufFile;
use minijinja::{Environment, Value, context, escape_formatter, syntax::SyntaxConfig, value::ValueKind};
use numcore::{Error, Result, Within};

use super::{gguf::tokenizer_fields, python, source::adapted};
use crate::files::JsonObject;

/// The most instructions of a template; the longest real ones take some thousands a message.
const FUEL: u64 = 5_000_000;
/// The longest text of a template, in bytes.
const MAX_TEXT: usize = 64 << 20;
/// The longest template, in bytes.
const MAX_TEMPLATE: usize = 1 << 20;

/// A conversation: messages, and the template's variables. Rows of chat files hold one each.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    messages: Vec<Value>,
    /// The template's variables besides messages, such as `tools`.
    variables: BTreeMap<String, Value>,
}

impl Conversation {
    /// An empty conversation.
    pub fn new() -> Self {
        Conversation::default()
    }

    /// Reads a row, `{"messages": [{"role": …, "content": …}, …]}`. The fields `tools`, `documents` and the entries of
    /// `chat_template_kwargs` become variables of the template; other fields are ignored.
    ///
    /// # Errors
    /// Fails if the row is no JSON, or has no list of messages with roles.
    #[track_caller]
    pub fn from_json(row: &str) -> Result<Self> {
        let wrong = |why: String| Error::format("a conversation", why);
        let row: Value = serde_json::from_str(row).map_err(|e| wrong(format!("it is no JSON: {e}"))).at_caller()?;
        let list = row.get_attr("messages").ok().filter(|list| list.kind() == ValueKind::Seq);
        let messages = list.and_then(|list| Some(list.try_iter().ok()?.collect::<Vec<_>>()));
        let Some(messages) = messages else { return Err(wrong("it has no list `messages`".into())).at_caller() };
        let has_role = |m: &Value| m.get_attr("role").is_ok_and(|role| role.as_str().is_some());
        if let Some(at) = messages.iter().position(|m| !has_role(m)) {
            return Err(wrong(format!("message {at} has no `role`"))).at_caller();
        }
        let given = |name: &str| row.get_attr(name).ok().filter(|v| !v.is_undefined() && !v.is_none());
        let mut variables: BTreeMap<String, Value> =
            ["tools", "documents"].iter().filter_map(|&name| Some((name.to_owned(), given(name)?))).collect();
        if let Some(more) = given(KWARGS) {
            let names = more.try_iter().ok().filter(|_| more.kind() == ValueKind::Map);
            for name in names.ok_or_else(|| wrong(format!("`{KWARGS}` is no object"))).at_caller()? {
                variables.insert(name.to_string(), more.get_item(&name).map_err(Error::other).at_caller()?);
            }
        }
        Ok(Conversation { messages: messages.into_iter().map(with_thoughts).collect(), variables })
    }

    /// Appends a message.
    pub fn with(mut self, role: &str, content: &str) -> Self {
        self.messages.push(context! { role => role, content => content });
        self
    }

    /// The number of messages.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Tells whether there are no messages.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Tells whether the message at index `at` is the assistant's.
    pub(super) fn is_assistant(&self, at: usize) -> bool {
        self.messages[at].get_attr("role").is_ok_and(|role| role.as_str() == Some("assistant"))
    }

    /// The conversation of the first `count` messages.
    pub(super) fn first(&self, count: usize) -> Conversation {
        Conversation { messages: self.messages[..count].to_vec(), variables: self.variables.clone() }
    }
}

/// The field of a row with more variables of the template.
const KWARGS: &str = "chat_template_kwargs";

/// A message with its reasoning under every name that templates use, as in transformers.
fn with_thoughts(message: Value) -> Value {
    let given = |name: &&str| message.get_attr(name).ok().filter(|v| !v.is_undefined() && !v.is_none());
    let Some(thoughts) = ["reasoning_content", "thinking", "reasoning"].iter().find_map(given) else { return message };
    let Ok(names) = message.try_iter() else { return message };
    let own = names.filter_map(|name| Some((name.clone(), message.get_item(&name).ok()?)));
    let first = [(Value::from("thinking"), thoughts.clone())].into_iter();
    Value::from_pairs(first.chain(own).chain([(Value::from("reasoning_content"), thoughts)]))
}

/// A date, for templates that write it into the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatDate {
    /// The year.
    pub year: i64,
    /// The month, from 1.
    pub month: u32,
    /// The day of the month, from 1.
    pub day: u32,
}

/// A model's chat template, a program of other people. It can read nothing but the conversation. It is stopped when it
/// takes too many instructions, recurses too deeply, or writes too much. Strings that it doubles within an expression
/// are bounded by the instructions alone.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The special tokens that templates may name, such as `bos_token`.
    tokens: BTreeMap<&'static str, String>,
}

/// The names of special tokens that templates may use.
const TOKENS: [&str; 7] = ["bos_token", "cls_token", "eos_token", "mask_token", "pad_token", "sep_token", "unk_token"];

/// The names of the template that is used by default, and of the one for conversations with tools.
const DEFAULT: &str = "default";
const WITH_TOOLS: &str = "tool_use";

impl ChatTemplate {
    /// Reads the template in a folder or a GGUF file, and the special tokens that it names. Templates of a folder are
    /// `chat_template.jinja` and those in `additional_chat_templates`, or else those in `tokenizer_config.json`. Of
    /// several, `default` is used, and `tool_use` for conversations with tools, as in transformers.
    ///
    /// # Errors
    /// Fails if there is none, or a file is malformed.
    #[track_caller]
    pub fn of_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let config = match GgufFile::is_at(folder) {
            true => tokenizer_fields(&GgufFile::open(folder).at_caller()?).at_caller()?,
            false => JsonObject::open(&folder.join("tokenizer_config.json"))?,
        };
        let older = folder.join("special_tokens_map.json");
        // Older folders have this file; a configuration that lists all tokens names special ones too.
        let older = (older.is_file() && config.get("added_tokens_decoder").is_none()).then(|| JsonObject::open(&older));
        let older = older.transpose()?;
        let token = |name: &'static str| {
            let value = older.as_ref().and_then(|older| older.get(name)).or_else(|| config.get(name))?;
            let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
            Some((name, text.to_owned()))
        };
        let mut templates = in_files(folder).at_caller()?;
        if templates.is_empty() {
            templates = in_config(&config);
        }
        if !templates.contains_key(DEFAULT) {
            let why = "is missing, and there is no chat_template.jinja: it is no chat model";
            return Err(config.wrong("chat_template", why)).at_caller();
        }
        Self::with_tokens(templates, TOKENS.into_iter().filter_map(token).collect()).at_caller()
    }

    /// Builds a template from its source, and the tokens that begin and end a text.
    ///
    /// # Errors
    /// Fails if it is no Jinja, or longer than 1 MiB.
    #[track_caller]
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self> {
        let templates = [(DEFAULT.to_owned(), source.to_owned())].into();
        Self::with_tokens(templates, [("bos_token", bos.into()), ("eos_token", eos.into())].into()).at_caller()
    }

    fn with_tokens(templates: BTreeMap<String, String>, tokens: BTreeMap<&'static str, String>) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(broken)?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(100);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, state, value| {
            if value.kind() == ValueKind::Number || python::is_container(value) {
                return out.write_str(&python::text(value)).map_err(minijinja::Error::from);
            }
            escape_formatter(out, state, value)
        });
        environment.add_filter(
            "string",
            |value: Value| if value.as_str().is_some() { value } else { python::text(&value).into() },
        );
        environment.add_filter("tojson", python::to_json);
        environment.add_function("raise_exception", python::raise_exception);
        for (name, source) in templates {
            if source.len() > MAX_TEMPLATE {
                return Err(Error::format("a chat template", format!("it has {} bytes", source.len())));
            }
            environment.add_template_owned(name, adapted(&source)).map_err(broken)?;
        }
        let template = ChatTemplate { environment, tokens };
        Ok(template.with_date(today()))
    }

    /// Sets the date that the template writes, so that its text does not depend on the current day.
    pub fn with_date(mut self, date: ChatDate) -> Self {
        self.environment.add_function("strftime_now", move |format: String| python::strftime(date, &format));
        self
    }

    /// Renders the text of a conversation; with `prompt`, also the beginning of an answer.
    ///
    /// # Errors
    /// Fails if the template refuses the conversation (for roles that do not alternate, for example), fails, or reaches
    /// a limit.
    #[track_caller]
    pub fn render(&self, conversation: &Conversation, prompt: bool) -> Result<String> {
        let variables = &conversation.variables;
        let special = variables.contains_key("tools").then(|| self.environment.get_template(WITH_TOOLS).ok()).flatten();
        let template =
            special.map_or_else(|| self.environment.get_template(DEFAULT), Ok).map_err(broken).at_caller()?;
        let tokens = self.tokens.iter().map(|(name, token)| (*name, Value::from(token.as_str())));
        let none = [("tools", Value::from(())), ("documents", Value::from(()))];
        let given = variables.iter().map(|(name, value)| (name.as_str(), value.clone()));
        let fixed = [("messages", conversation.messages.clone().into()), ("add_generation_prompt", prompt.into())];
        let context = Value::from_pairs(tokens.chain(none).chain(given).chain(fixed));
        let mut text = Bounded(Vec::new());
        template.render_captured_to(context, &mut text).map_err(broken).at_caller()?;
        String::from_utf8(text.0).map_err(Error::other).at_caller()
    }
}

/// A buffer for a text, up to a limit.
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

/// The templates in files of a folder.
fn in_files(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut templates = BTreeMap::new();
    let mut read = |name: &str, path: &Path| {
        let source = fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
        templates.insert(name.to_owned(), source);
        Ok::<_, Error>(())
    };
    let path = folder.join("chat_template.jinja");
    if path.is_file() {
        read(DEFAULT, &path)?;
    }
    for entry in fs::read_dir(folder.join("additional_chat_templates")).into_iter().flatten() {
        let path = entry.map_err(|e| Error::io(folder, e))?.path();
        if let Some(name) = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".jinja")) {
            read(name, &path)?;
        }
    }
    Ok(templates)
}

/// The templates in `tokenizer_config.json`: a string, or a list of named ones.
fn in_config(config: &JsonObject) -> BTreeMap<String, String> {
    let named = |entry: &serde_json::Value| {
        let text = |field| entry.get(field)?.as_str().map(str::to_owned);
        Some((text("name")?, text("template")?))
    };
    match config.get("chat_template") {
        Some(serde_json::Value::String(text)) => [(DEFAULT.to_owned(), text.clone())].into(),
        Some(serde_json::Value::Array(list)) => list.iter().filter_map(named).collect(),
        _ => BTreeMap::new(),
    }
}

/// The current date, in UTC.
fn today() -> ChatDate {
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (year, month, day) = data::calendar::civil_date(seconds / 86_400);
    ChatDate { year: year as i64, month, day }
}
