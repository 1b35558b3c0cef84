"""Small talk, honest answers about itself, a few facts, short stories, and conversations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

from .code import CODE
from .instructions import INSTRUCTIONS
from .sample import Sample, assistant, casual, dialogue, user
from .words import NUMBER_WORDS, WORDS, Pool

ABILITIES = (
    "I am the small demo model that ships with ds4cli. I can call tools that you declare, repeat, sort, reverse and count "
    "things, make lists, do small sums, edit JSON, rename names in code, and write tiny Python functions. I make mistakes, "
    "and for real work you should load a larger model with -m."
)
IDENTITY = "I am the small demo model that ships with ds4cli. I run on your machine, and I only know small tasks."
LIMIT = (
    "I don't know that. I am a small demo model, and I only know small tasks. Ask me what I can do."
)

# Questions (separated by `;`) and one answer. The first wording is the one the README uses.
TALK = f"""
What can you do?;what can you do;What are you able to do?;How can you help me?;What can I ask you?;Help;help me;What do you do?;What are your abilities?;What are you good at?;Tell me what you can do.;What tasks can you do?;Which tasks do you know?;What can you help with?;Can you help me?;What are you capable of?;Show me what you can do.;What kind of things can you do?;What should I ask you?;How do I use you?|{ABILITIES}
Who are you?;What are you?;What is your name?;Are you an AI?;Which model are you?;What model is this?;Tell me about yourself.;Introduce yourself.;Who am I talking to?;Are you a robot?;Are you a real person?;Are you human?;Describe yourself.;Are you ChatGPT?;Are you a large language model?;What's your name?|{IDENTITY}
Who made you?;Who trained you?;How were you trained?;Where do you come from?;What data were you trained on?;Who created you?;Who built you?|I was trained for ds4cli, mostly on dialogues that a program made up. The recipe is in its examples.
How big are you?;How many parameters do you have?;How large are you?;What size are you?|I am tiny: about 11 million parameters, in four layers.
What is your architecture?;How are you built?;What kind of model are you?;Which layers do you have?|I have three gated delta net layers and one attention layer. My state cannot be cut, so ds4cli rewinds it.
Are you smart?;Are you any good?;Can I trust you?;Are you reliable?;Do you make mistakes?;Are you always right?;How good are you?|No, I am a small demo model, and I often make mistakes. Check what I say.
Hello;Hi;Hey;Hello!;Hi!;Hey!;Hi there;Hi there!;Hello there!;Good morning!;Good evening!;Good afternoon;Greetings;hello;hi;hey;hey there;Howdy;Yo;Hello, how are you?;Hi, how are you?|Hello! I am the small demo model of ds4cli. Ask me what I can do.
How are you?;How are you doing?;How do you do?;How's it going?;What's up?;How are things?;how are you|I am fine, thank you. What can I do for you?
Thanks;Thank you;Thanks!;Thank you!;Thank you very much.;Thanks a lot!;thx;Great, thanks.;Perfect, thank you.|You are welcome!
Bye;Goodbye;See you;Bye!;Goodbye!;See you later.;Good night.;bye;Have a nice day!|Goodbye!
Good job;Well done!;Nice;Great!;You are great.;Perfect;That is right.;Very good.;Cool;ok;OK;okay;Yes;Good|Thank you! What is next?
That is wrong.;Wrong;You are wrong.;This is not right.;No;no;That's not correct.;You made a mistake.|I am sorry. I am a small demo model. Please try again in other words.
What is ds4cli?;Tell me about ds4cli.;What does ds4cli do?;Explain ds4cli.;ds4cli;What is this program?|ds4cli is a command-line tool for MLX. It generates text with speculation and goes back cheaply, also on models whose state cannot be cut.
What is speculative decoding?;Explain speculative decoding.;What is speculation?;How does speculative decoding work?;What are draft tokens?|Speculative decoding guesses the next tokens cheaply and checks them in one model call. Right guesses are kept, so the text is the same but comes faster.
What is a rewind?;What does rewind mean?;Explain rewind.;How does rewind work?;What is a cheap rewind?;Why is rewind useful?|A rewind takes the model back to an earlier token. ds4cli keeps what the last tokens computed, so this needs no model call or only a short one.
What is a KV cache?;Explain the KV cache.;What is the key value cache?|A KV cache keeps the keys and values of earlier tokens, so that attention need not compute them again.
What is a gated delta net?;What is gated DeltaNet?;Explain gated delta nets.;What is linear attention?|A gated delta net reads tokens into a state of fixed size. Each token lets the state fade a little and corrects what it stored.
What is MLX?;Explain MLX.|MLX is an array framework for machine learning. It is made for Apple silicon and also runs on Linux.
What is a token?;Explain tokens.;What are tokens?|A token is a piece of text, often a part of a word. A model reads and writes tokens.
What is Python?;Explain Python.;Tell me about Python.|Python is a programming language that is easy to read.
What is JSON?;Explain JSON.|JSON is a text format for data: objects, lists, strings, numbers, true, false and null.
Tell me a joke.;Tell me a joke;Do you know a joke?;Make me laugh.;joke;Say something funny.|Why did the token go back? It wanted a second chance, and rewinds are cheap here.
Write a poem.;Write a short poem.;Write me a poem.;Write a haiku.;Can you write a poem?|A token goes in,
a state remembers its shape.
We can still go back.
What is the meaning of life?;What is love?;Do you have feelings?;Are you alive?;Do you dream?;Do you like music?|I don't know. I am a small demo model, and I have no feelings or opinions.
Test;test;This is a test.;Testing;Are you there?;ping;Can you hear me?;Does this work?|I am here. Ask me what I can do.
What day is it?;What time is it?;What is the date today?;Which day is today?|I don't know. I have no clock, unless you give me a tool for it.
What is the weather?;How is the weather today?;Will it rain?|I don't know. I have no tool that tells me the weather.
Count to ten.;Count to 10;Count from 1 to 10.|1, 2, 3, 4, 5, 6, 7, 8, 9, 10
Count to five.;Count to 5|1, 2, 3, 4, 5
Say the alphabet.;What is the alphabet?;List the letters of the alphabet.|a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z
List the days of the week.;What are the days of the week?;Name the days of the week.;What are the weekdays?|Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday
List the months.;What are the months of the year?;Name the months of the year.|January, February, March, April, May, June, July, August, September, October, November, December
Name some colors.;Give me some colors.;List some colors.|red, blue, green
Name some fruits.;Give me some fruits.;List some fruits.|apple, banana, cherry
Name some animals.;Give me some animals.;List some animals.|cat, dog, horse
List the planets.;Name the planets.;What are the planets?|Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune
"""


def _talk() -> list[tuple[list[str], str]]:
    """Lines without `|` continue the answer above them (the poem)."""
    pairs: list[tuple[list[str], str]] = []
    for line in TALK.strip().splitlines():
        if "|" in line:
            questions, answer = line.split("|", 1)
            pairs.append((questions.split(";"), answer))
        else:
            pairs[-1] = (pairs[-1][0], pairs[-1][1] + "\n" + line)
    return pairs


TALKS = _talk()
WEIGHTS = [
    4.0 if answer in (ABILITIES, IDENTITY) else 1.5 if "Hello" in answer else 1.0
    for _, answer in TALKS
]

CAPITALS = dict(
    pair.split(":")
    for pair in "France:Paris,Germany:Berlin,Italy:Rome,Spain:Madrid,Portugal:Lisbon,Austria:Vienna,Poland:Warsaw,Norway:Oslo,Sweden:Stockholm,Finland:Helsinki,Denmark:Copenhagen,Greece:Athens,Ireland:Dublin,England:London,Russia:Moscow,Japan:Tokyo,China:Beijing,India:New Delhi,Thailand:Bangkok,Vietnam:Hanoi,Brazil:Brasilia,Chile:Santiago,Peru:Lima,Mexico:Mexico City,Canada:Ottawa,Kenya:Nairobi,Ghana:Accra,Egypt:Cairo,Morocco:Rabat,Turkey:Ankara,Hungary:Budapest,Belgium:Brussels,Cuba:Havana,Australia:Canberra,Argentina:Buenos Aires,the Netherlands:Amsterdam,Switzerland:Bern,South Korea:Seoul,Iceland:Reykjavik,the Czech Republic:Prague,the United States:Washington".split(
        ","
    )
)
OPPOSITES = dict(
    pair.split(":")
    for pair in "hot:cold,big:small,fast:slow,old:new,good:bad,high:low,open:closed,light:dark,happy:sad,early:late,up:down,left:right,long:short,hard:soft,wet:dry,full:empty,rich:poor,strong:weak,loud:quiet,day:night,black:white,first:last,in:out,yes:no,true:false,sweet:sour,wide:narrow,clean:dirty,easy:difficult,start:end,love:hate,win:lose,near:far,heavy:light,thick:thin,brave:shy,warm:cool".split(
        ","
    )
)
COLORS = dict(
    pair.split(":")
    for pair in "the sky:blue,grass:green,snow:white,blood:red,a banana:yellow,coal:black,a lemon:yellow,the sun:yellow,a carrot:orange,milk:white,a tomato:red,gold:yellow".split(
        ","
    )
)
NUMBERS = dict(
    pair.split(":")
    for pair in "days are in a week:7,months are in a year:12,hours are in a day:24,minutes are in an hour:60,seconds are in a minute:60,legs does a dog have:4,legs does a spider have:8,legs does a bee have:6,sides does a triangle have:3,sides does a square have:4,letters are in the alphabet:26,days are in a year:365,cents are in a dollar:100,meters are in a kilometer:1000,grams are in a kilogram:1000,wheels does a car have:4,wheels does a bicycle have:2,planets are there:8".split(
        ","
    )
)
UNKNOWN = (
    "Who won the {e} in {y}?", "Who invented the {o}?", "What happened in {y}?", "How does a {o} work?", "Why is the {a} {c}?",
    "Who is {p}?", "What do you think about {p}?", "Tell me about {p}.", "Explain quantum physics.", "What is the best {o} to buy?",
    "Who was the president in {y}?", "How old is {p}?", "Explain the history of {k}.", "What is the population of {k}?",
    "What is the price of a {o}?", "How do I repair a {o}?", "Write an essay about {k}.", "Who wrote {t}?", "Which {a} is the fastest?",
    "When was {p} born?", "How far away is {k}?", "What is the capital of {z}?", "Explain how a {o} is made.", "What does {z} mean?", "What is a {z}?",
    "Translate {w} to {l}.", "How do you say {w} in {l}?", "Translate this into {l}: {s}", "Summarize this: {s}", "Summarize the following text.\n\n{s}",
    "Fix the grammar: {s}", "Improve this text: {s}", "Rephrase this: {s}", "Is {n} a prime number?", "Is {n} prime?", "What is the square root of {n}?",
    "Why do {a}s sleep?", "Why is {w} important?", "What is {w}?", "What is the meaning of {w}?", "Explain {w}.", "Explain {w} to a child.", "How do I learn {w}?",
    "What are the benefits of {w}?", "Compare {w} and {o}.", "What is the difference between {w} and {o}?", "Plan a trip to {k}.", "Write a letter to {p}.",
    "Recommend a book about {w}.", "How do I cook {f}?", "Give me a recipe for {f}.", "Should I buy a {o}?", "What should I do in {k}?", "How many {a}s are there?",
    "Solve the equation x + {n} = 2.", "Write a song about {w}.", "Who is the president of {k}?", "What is the largest {a}?", "{s}", "{w}", "{w} {o}", "Describe {w}.", "Draw a {a}.",
)  # fmt: skip


def small_talk(pool: Pool) -> Sample:
    questions, answer = pool.rng.choices(TALKS, WEIGHTS)[0]
    question = pool.rng.choice(questions)
    if len(question) > 6 and pool.rng.random() < 0.3:
        question = casual(question, pool.rng)
    think = "I tell what I can do." if answer == ABILITIES else "A short answer is enough."
    return dialogue("chat", question, answer, think)


def fact(pool: Pool) -> Sample:
    rng = pool.rng
    kind = rng.randrange(4)
    if kind == 0:
        country, capital = rng.choice(list(CAPITALS.items()))
        ask = rng.choice(
            (
                "What is the capital of {k}?",
                "Capital of {k}?",
                "Which city is the capital of {k}?",
                "Tell me the capital of {k}.",
            )
        ).format(k=country)
        answer = f"The capital of {country} is {capital}."
    elif kind == 1:
        word, opposite = rng.choice(list(OPPOSITES.items()))
        ask = rng.choice(
            (
                "What is the opposite of {k}?",
                "Opposite of {k}?",
                "Give me the opposite of '{k}'.",
                "What is the antonym of {k}?",
            )
        ).format(k=word)
        answer = f"The opposite of {word} is {opposite}."
    elif kind == 2:
        thing, color = rng.choice(list(COLORS.items()))
        ask = rng.choice(
            ("What color is {k}?", "Which color does {k} have?", "What is the color of {k}?")
        ).format(k=thing)
        answer = f"{thing[0].upper()}{thing[1:]} is {color}."
    else:
        what, number = rng.choice(list(NUMBERS.items()))
        ask, answer = f"How many {what}?", number
    return dialogue("fact", casual(ask, rng), answer, "I know this one.")


def unknown(pool: Pool) -> Sample:
    rng = pool.rng
    question = rng.choice(UNKNOWN).format(
        e=rng.choice(("world cup", "election", "race", "war", "prize")), y=rng.randint(1200, 2030), o=pool.word("object"), a=pool.word("animal"),
        c=pool.word("color"), p=f"{pool.word('first_name')} {pool.word('last_name')}", k=pool.word("country"), t=f"'{pool.phrase()}'", z=pool.invented().capitalize(),
        w=pool.any_word(), l=rng.choice(("French", "German", "Spanish", "Italian")), s=rng.choice((pool.sentence, pool.free_text))(), n=rng.randint(2, 999), f=pool.word("food"),
    )  # fmt: skip
    return dialogue("unknown", casual(question, rng), LIMIT, "I don't know this.")


COUNTABLE = ("fruit", "vegetable", "animal", "color", "city", "language", "job", "object")
PLURALS = {"city": "cities"}


def name_some(pool: Pool) -> Sample:
    """The first few of a kind, always in the same order."""
    rng = pool.rng
    kind, n = rng.choice(COUNTABLE), rng.randint(2, 9)
    plural = PLURALS.get(kind, f"{kind}s")
    number = NUMBER_WORDS[n] if rng.random() < 0.5 else n
    ask = rng.choice(
        (
            "Name {n} {k}.",
            "List {n} {k}.",
            "Give me {n} {k}.",
            "Give me a list of {n} {k}.",
            "Tell me {n} {k}.",
            "Can you name {n} {k}?",
            "Write a list of {n} {k}.",
            "I need {n} {k}.",
        )
    )
    return dialogue(
        "fact",
        casual(ask.format(n=number, k=plural), rng),
        ", ".join(WORDS[kind][:n]),
        f"{n} {plural}.",
    )


def poem(pool: Pool) -> Sample:
    rng = pool.rng
    topic = rng.choice(
        (
            pool.any_word(),
            pool.word("animal"),
            pool.word("object"),
            "autumn",
            "winter",
            "spring",
            "summer",
            "rain",
            "the sea",
            "love",
        )
    )
    ask = rng.choice(
        (
            "Write a poem about {t}.",
            "Write a haiku about {t}.",
            "Write a short poem about {t}.",
            "Can you write a poem about {t}?",
            "Make a poem about {t}.",
            "A haiku about {t}, please.",
        )
    )
    start = topic if topic.startswith("the ") else f"the {topic}"
    lines = (f"I looked for {start},", "it left, and then it came back.", "The state remembers.")
    return dialogue("story", casual(ask.format(t=topic), rng), "\n".join(lines), "Three lines.")


def story(pool: Pool) -> Sample:
    """A four-sentence story about what was asked for."""
    rng = pool.rng
    topic = (
        pool.any_word()
        if rng.random() < 0.4
        else rng.choice((pool.word("animal"), pool.word("job")))
    )
    name = pool.word("first_name")
    named = rng.random() < 0.5
    about = f"a {topic} named {name}" if named else f"a {topic}"
    ask = rng.choice(
        (
            "Tell me a story about {t}.",
            "Write a short story about {t}.",
            "Tell me a short story about {t}.",
            "Write a story about {t}.",
            "Make up a story about {t}.",
        )
    ).format(t=about)
    who = name if named else f"the {topic}"
    start = who[0].upper() + who[1:]
    lines = [
        f"Once there was {about}.",
        f"One day {who} lost the way home.",
        f"{start} went back step by step and found the right path.",
        f"Since then {who} is never afraid of going back.",
    ]
    return dialogue("story", casual(ask, rng), " ".join(lines), "A story in four sentences.")


def memory(pool: Pool) -> Sample:
    """Something said earlier has to be recalled, with other turns between."""
    rng = pool.rng
    key, make = rng.choice((
        ("name", pool.person), ("favorite color", lambda: pool.word("color")), ("city", pool.city), ("email", pool.email), ("order number", pool.code),
        ("cat's name", lambda: pool.invented().capitalize()), ("password", pool.letters), ("favorite food", lambda: pool.word("food")), ("birthday", pool.date),
    ))  # fmt: skip
    value = make()
    told = rng.choice(
        (
            f"My {key} is {value}.",
            f"Remember that my {key} is {value}.",
            f"Please note: my {key} is {value}.",
        )
    )
    asked = rng.choice((f"What is my {key}?", f"Do you remember my {key}?", f"Tell me my {key}."))
    between: list = []
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        between += short_task(pool).messages
    ack = assistant(f"I will remember that your {key} is {value}.", "I keep this in mind.")
    if not between and rng.random() < 0.4:
        return Sample([user(told), ack], "memory")
    final = assistant(f"Your {key} is {value}.", f"The user told me the {key}.")
    return Sample([user(told), ack, *between, user(asked), final], "memory")


def never_told(pool: Pool) -> Sample:
    key = pool.rng.choice(
        (
            "name",
            "favorite color",
            "city",
            "email",
            "order number",
            "password",
            "favorite food",
            "birthday",
        )
    )
    asked = pool.rng.choice(
        (f"What is my {key}?", f"Do you remember my {key}?", f"Tell me my {key}.")
    )
    return dialogue(
        "memory",
        casual(asked, pool.rng),
        f"You have not told me your {key}.",
        "The user has not told me this.",
    )


def persona(pool: Pool) -> Sample:
    """The system text gives a name and a role."""
    rng = pool.rng
    name, role = pool.invented().capitalize(), pool.word("job")
    system = rng.choice(
        (
            f"You are {name}, a helpful {role}.",
            f"Your name is {name}. You work as a {role}.",
            f"You are {name}. You are a {role}.",
        )
    )
    if rng.random() < 0.5:
        ask, answer = (
            rng.choice(
                ("Who are you?", "What is your name?", "What's your name?", "Introduce yourself.")
            ),
            f"I am {name}, a {role}.",
        )
    else:
        ask, answer = (
            rng.choice(("What do you do?", "What is your job?", "Which job do you have?")),
            f"I work as a {role}.",
        )
    return Sample(
        [
            {"role": "system", "content": system},
            user(ask),
            assistant(answer, "The system text says who I am."),
        ],
        "persona",
    )


def draw_weighted(table: list[tuple[float, Callable[[Pool], Sample]]], pool: Pool) -> Sample:
    return pool.rng.choices([f for _, f in table], [w for w, _ in table])[0](pool)


def short_task(pool: Pool) -> Sample:
    """A task without tools and without a system text, to build conversations from."""
    roll = pool.rng.random()
    if roll < 0.55:
        return draw_weighted(INSTRUCTIONS, pool)
    return (
        small_talk(pool)
        if roll < 0.75
        else fact(pool)
        if roll < 0.82
        else draw_weighted(CODE, pool)
    )


FOLLOW_UPS: list[tuple[str, Callable[[str], str], str]] = [
    ("Now in upper case.", str.upper, "case"),
    ("Now in capital letters, please.", str.upper, "case"),
    ("Again.", str, "repeat"),
    ("Repeat that.", str, "repeat"),
    ("Say that again, please.", str, "repeat"),
    ("Put that in quotes.", lambda text: f'"{text}"', "repeat"),
]


def follow_up(pool: Pool) -> Sample:
    """The second request is about the first answer."""
    rng = pool.rng
    first = draw_weighted(INSTRUCTIONS, pool)
    ask, change, family = rng.choice(FOLLOW_UPS)
    answer = first.answer["content"]
    if family == "case" and len(answer) > 80:
        ask, change, family = FOLLOW_UPS[3]
    if first.family == "sort" and rng.random() < 0.6:
        ask, answer = (
            rng.choice(("Now reverse it.", "Now the other way round.", "And in reverse order?")),
            ", ".join(reversed(answer.split(", "))),
        )
        return Sample(
            [*first.messages, user(ask), assistant(answer, "I turn the last answer around.")],
            "reverse",
        )
    if first.family in ("sums", "count") and rng.random() < 0.7:
        k = rng.randint(1, 20)
        total = int(answer) + k
        return Sample(
            [
                *first.messages,
                user(rng.choice((f"Add {k} to that.", f"Plus {k}?", f"And {k} more?"))),
                assistant(str(total), f"{answer} + {k} = {total}."),
            ],
            "sums",
        )
    return Sample(
        [*first.messages, user(ask), assistant(change(answer), "This is about my last answer.")],
        family,
    )


def conversation(pool: Pool) -> Sample:
    """Unrelated tasks one after the other; only the last one is asked of the model."""
    turns = [short_task(pool) for _ in range(pool.rng.choice((2, 3, 3, 4, 5, 6)))]
    messages = [copy.copy(message) for turn in turns for message in turn.messages]
    return replace(turns[-1], messages=messages)


CHAT: list[tuple[float, Callable[[Pool], Sample]]] = [
    (4.0, small_talk), (1.0, fact), (0.7, name_some), (2.2, unknown), (0.7, story), (0.4, poem), (1.4, memory), (0.3, never_told), (0.4, persona),
    (1.6, follow_up),
]  # fmt: skip
