"""Tools that people recognise: declarations, ways to ask for them, and results.

Each line of `CATALOGUE` is `name | description | parameters | requests | result | answer`.
Parameters are `name:kind`, a `?` marks an optional one. In a request `{name}` is replaced by the
value, and a part in square brackets is left out together with the optional parameter it mentions.
Result fields are `name:kind`; the answer may use them and the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

LINES = """
get_weather | Get the current weather for a city. | city:city unit?:enum(celsius,fahrenheit) | What is the weather in {city}[ in {unit}]?; How is the weather in {city} right now[, in {unit}]?; Weather for {city}[ in {unit}] please.; Is it raining in {city}?; Tell me the current weather in {city}[ using {unit}]. | temperature:int(-15,40) condition:enum(sunny,cloudy,rain,snow,windy,foggy) | It is {temperature} degrees and {condition} in {city}.
get_forecast | Get the weather forecast for the next days. | city:city days:int(1,14) | What will the weather be like in {city} for the next {days} days?; Give me a {days} day forecast for {city}.; Show the forecast for {city} over {days} days. | summary:enum(mostly sunny,mostly cloudy,light rain,heavy rain,snow showers) high:int(5,40) low:int(-15,4) | The next {days} days in {city}: {summary}, with a high of {high} and a low of {low}.
send_email | Send an email to one recipient. | to:email subject:phrase body?:sentence | Send an email to {to} with the subject '{subject}'[ and the text '{body}'].; Email {to}, subject: {subject}[. Text: {body}]; Write to {to} about '{subject}'[ and say '{body}']. | status:enum(sent,queued) id:code | The email to {to} is {status}. Its id is {id}.
send_message | Send a text message to a person. | recipient:person text:sentence | Send a message to {recipient}: {text}; Text {recipient} '{text}'; Tell {recipient} by message: {text} | status:enum(delivered,sent,queued) | Your message to {recipient} is {status}.
create_event | Create a calendar event. | title:phrase date:date time?:time duration?:int(10,240) | Create an event '{title}' on {date}[ at {time}][ for {duration} minutes].; Put '{title}' in my calendar on {date}[ at {time}][, {duration} minutes long].; Schedule {title} for {date}[ at {time}]. | event_id:code | '{title}' is in your calendar on {date}. The event id is {event_id}.
set_reminder | Set a reminder. | text:phrase time:time | Remind me to {text} at {time}.; Set a reminder for {time}: {text}; At {time}, remind me to {text}. | status:enum(set,saved) | Your reminder for {time} is {status}.
set_timer | Start a countdown timer. | minutes:int(1,90) label?:phrase | Set a timer for {minutes} minutes[ called '{label}'].; Start a {minutes} minute timer[ named '{label}'].; Wake me in {minutes} minutes[ and call it '{label}']. | timer_id:code | Your timer runs for {minutes} minutes. Its id is {timer_id}.
convert_currency | Convert an amount of money between currencies. | amount:number source:currency target:currency | Convert {amount} {source} to {target}.; How much is {amount} {source} in {target}?; What are {amount} {source} worth in {target}? | result:number | {amount} {source} are {result} {target}.
convert_units | Convert a value from one unit to another. | value:number from_unit:unit to_unit:unit | Convert {value} {from_unit} to {to_unit}.; How many {to_unit} are {value} {from_unit}?; Change {value} {from_unit} into {to_unit}. | result:number | {value} {from_unit} are {result} {to_unit}.
search_web | Search the web. | query:phrase limit?:int(1,20) | Search the web for {query}[ and show {limit} results].; Look up '{query}' online[, {limit} results].; Find {limit} pages about {query}.; Google {query}. | count:int(1,900) top:url | I found {count} results. The first is {top}.
search_flights | Search flights between two cities. | origin:city destination:city date:date passengers?:int(1,6) | Find flights from {origin} to {destination} on {date}[ for {passengers} people].; I want to fly from {origin} to {destination} on {date}[, {passengers} passengers].; Show me flights to {destination} from {origin} on {date}. | flight:code price:int(40,1500) | Flight {flight} from {origin} to {destination} costs {price}.
book_hotel | Book a hotel room. | city:city check_in:date nights:int(1,21) guests?:int(1,6) | Book a hotel in {city} from {check_in} for {nights} nights[ and {guests} guests].; I need a room in {city} for {nights} nights starting {check_in}[ for {guests} people].; Reserve a hotel room in {city}, {check_in}, {nights} nights. | hotel:word booking:code | You are booked at hotel {hotel} in {city}. The booking number is {booking}.
book_table | Reserve a table in a restaurant. | restaurant:proper people:int(1,12) date:date time:time | Book a table at {restaurant} for {people} on {date} at {time}.; Reserve a table for {people} people at {restaurant}, {date} {time}.; I'd like a table for {people} at {restaurant} on {date} at {time}. | confirmation:code | Your table for {people} at {restaurant} is reserved. The confirmation is {confirmation}.
get_stock_price | Get the latest price of a stock. | symbol:symbol | What is the stock price of {symbol}?; How is {symbol} trading?; Get me the price of {symbol} shares.; Price of {symbol}? | price:number change:number | {symbol} is at {price}, a change of {change}.
get_time | Get the current time in a city. | city:city | What time is it in {city}?; Tell me the time in {city}.; Current time in {city}? | time:time | It is {time} in {city}.
get_distance | Get the distance between two places. | start:city end:city mode?:enum(driving,walking,cycling) | How far is it from {start} to {end}[ {mode}]?; What is the distance between {start} and {end}[ when {mode}]?; Distance from {start} to {end}[, {mode}]. | kilometers:int(3,9000) | It is {kilometers} kilometers from {start} to {end}.
get_directions | Get directions from one place to another. | origin:city destination:city | How do I get from {origin} to {destination}?; Give me directions from {origin} to {destination}.; Show the route from {origin} to {destination}. | via:city minutes:int(10,900) | Go via {via}. It takes {minutes} minutes.
translate_text | Translate text into another language. | text:sentence target_language:language | Translate '{text}' into {target_language}.; How do you say '{text}' in {target_language}?; Put this into {target_language}: {text} | translation:invented | In {target_language}: {translation}
play_music | Play music by an artist or a song. | artist:person song?:phrase | Play music by {artist}.; Play[ '{song}' by] {artist}.; Put on[ '{song}' by] {artist}.; I want to hear[ '{song}' by] {artist}. | status:enum(playing,queued) | {artist} is {status}.
set_volume | Set the playback volume in percent. | level:int(0,100) | Set the volume to {level} percent.; Volume {level}.; Turn the volume to {level}.; Make it {level} percent loud. | level_now:int(0,100) | The volume is now {level_now}.
turn_on_light | Turn on the light in a room. | room:place brightness?:int(1,100) | Turn on the light in the {room}[ at {brightness} percent].; Lights on in the {room}[, {brightness} percent].; Switch the {room} light on[ with brightness {brightness}]. | status:enum(on) | The light in the {room} is {status}.
turn_off_light | Turn off the light in a room. | room:place | Turn off the light in the {room}.; Lights off in the {room}.; Switch off the {room} light.; Make it dark in the {room}. | status:enum(off) | The light in the {room} is {status}.
set_thermostat | Set the target temperature of a room. | room:place temperature:number | Set the {room} to {temperature} degrees.; Heat the {room} to {temperature} degrees.; Make the {room} {temperature} degrees warm. | status:enum(heating,cooling,set) | The {room} thermostat is {status}.
read_file | Read a text file. | path:path | Read the file {path}.; Show me the contents of {path}.; What is in {path}?; Open {path}.; cat {path} | lines:int(1,900) | {path} has {lines} lines.
write_file | Write text to a file. | path:path content:sentence | Write '{content}' to {path}.; Save the text '{content}' in {path}.; Put '{content}' into the file {path}. | bytes:int(5,4000) | I wrote {bytes} bytes to {path}.
delete_file | Delete a file. | path:path | Delete {path}.; Remove the file {path}.; Please get rid of {path}.; rm {path} | status:enum(deleted) | {path} is {status}.
list_files | List the files in a folder. | folder:folder | List the files in {folder}.; What files are in {folder}?; Show me everything in the folder {folder}.; ls {folder} | count:int(0,400) | {folder} contains {count} files.
move_file | Move a file to another place. | source:path destination:path | Move {source} to {destination}.; Rename {source} to {destination}.; mv {source} {destination} | status:enum(moved) | {source} was {status} to {destination}.
run_command | Run a shell command. | command:command timeout?:int(1,600) | Run `{command}`[ with a timeout of {timeout} seconds].; Execute the command `{command}`[, timeout {timeout}].; Please run this: {command} | exit_code:int(0,2) | The command ended with exit code {exit_code}.
search_code | Search a code base for a pattern. | pattern:ident path?:folder | Search the code for {pattern}[ in {path}].; Where is {pattern} used[ under {path}]?; grep for {pattern}[ in {path}].; Find {pattern} in the sources. | matches:int(0,200) first:path | There are {matches} matches. The first is in {first}.
run_tests | Run the test suite. | path?:path | Run the tests[ in {path}].; Please run the test suite[ for {path}].; Test[ {path}]. | passed:int(1,400) failed:int(0,9) | {passed} tests passed and {failed} failed.
create_issue | Create an issue in a tracker. | title:phrase labels?:list(word,1,3) priority?:enum(low,medium,high,urgent) | Create an issue titled '{title}'[ with labels {labels}][ and priority {priority}].; Open an issue: {title}[. Labels: {labels}][. Priority: {priority}]; File a bug '{title}'[, priority {priority}]. | number:int(1,9999) | Issue number {number} was created.
close_issue | Close an issue by its number. | number:int(1,9999) reason?:phrase | Close issue {number}[ because: {reason}].; Please close #{number}[ ({reason})].; Issue {number} is done, close it. | state:enum(closed) | Issue {number} is {state}.
git_commit | Commit staged changes. | message:phrase | Commit with the message '{message}'.; git commit: {message}; Commit my changes as '{message}'. | hash:code | Committed as {hash}.
create_branch | Create a git branch. | name:ident base?:ident | Create a branch {name}[ from {base}].; Make a new branch called {name}[ based on {base}].; git branch {name}[ {base}] | commit:code | Branch {name} starts at {commit}.
get_order | Look up an order. | order_id:code | Where is my order {order_id}?; Look up order {order_id}.; What is the status of order {order_id}?; Check order {order_id}. | status:enum(pending,paid,shipped,delivered,cancelled) total:number | Order {order_id} is {status}. The total is {total}.
cancel_order | Cancel an order. | order_id:code reason?:phrase | Cancel order {order_id}[ because {reason}].; I want to cancel my order {order_id}[, reason: {reason}].; Please stop order {order_id}. | status:enum(cancelled,refused) | Order {order_id} was {status}.
track_package | Track a package. | tracking_number:code carrier?:proper | Track package {tracking_number}[ with {carrier}].; Where is my parcel {tracking_number}[ sent by {carrier}]?; Follow the shipment {tracking_number}. | location:city eta:date | Your package is in {location} and arrives on {eta}.
add_to_cart | Add a product to the shopping cart. | product:thing quantity:int(1,20) | Add {quantity} {product} to my cart.; Put {quantity} {product} in the basket.; I want to buy {quantity} {product}. | items:int(1,40) | Your cart now has {items} items.
find_product | Search the product catalogue. | query:thing max_price?:number category?:enum(home,garden,kitchen,toys,books,sports) | Find a {query}[ under {max_price}][ in {category}].; Show me {query} products[ in the {category} category][ below {max_price}].; Do you sell a {query}[ for less than {max_price}]? | name:invented price:number | I found {name} for {price}.
create_user | Create a user account. | name:person email:email role?:enum(admin,editor,viewer,guest) | Create a user {name} with the email {email}[ and the role {role}].; Add {name} ({email})[ as {role}].; Make an account for {name}, {email}[, role {role}]. | user_id:code | {name} was created with the id {user_id}.
find_contact | Find a contact by name. | name:person | Find the contact {name}.; What is the phone number of {name}?; Look up {name} in my contacts.; Who is {name}? | phone:phone email:email | {name} has the phone number {phone} and the email {email}.
make_call | Call a phone number. | number:phone | Call {number}.; Dial {number}.; Phone {number} please. | status:enum(ringing,busy) | {number} is {status}.
calculate | Evaluate an arithmetic expression. | expression:expression | Calculate {expression}.; What is {expression}?; Compute {expression}.; How much is {expression}? | result:int(1,99999) | {expression} = {result}.
get_definition | Get the dictionary definition of a word. | word:word language?:language | Define '{word}'[ in {language}].; What does {word} mean?; Look up the meaning of {word}[ in {language}]. | definition:phrase | {word}: {definition}.
get_news | Get news headlines on a topic. | topic:word country?:country | Get me the news about {topic}[ from {country}].; What's new in {topic}[ in {country}]?; Show headlines on {topic}. | headline:sentence | The top headline: {headline}
query_database | Run an SQL query. | sql:sql limit?:int(1,500) | Run the query {sql}[ with a limit of {limit}].; Execute this SQL: {sql}; Ask the database: {sql} | rows:int(0,900) | The query returned {rows} rows.
create_table | Create a database table. | name:ident columns:list(ident,2,5) | Create a table {name} with the columns {columns}.; Make a table called {name} having columns {columns}.; I need a table {name}: {columns}. | status:enum(created) | Table {name} was {status}.
resize_image | Resize an image. | path:path width:int(16,4096) height:int(16,4096) | Resize {path} to {width} by {height}.; Make {path} {width}x{height} pixels.; Scale the image {path} to {width} x {height}. | bytes:int(900,90000) | {path} now has {bytes} bytes.
take_note | Save a note. | text:sentence tags?:list(word,1,3) | Note: {text}[ Tags: {tags}]; Write down '{text}'[ with the tags {tags}].; Save a note that says '{text}'[, tagged {tags}]. | note_id:code | Your note was saved as {note_id}.
add_task | Add a task to a to-do list. | title:phrase due?:date priority?:enum(low,normal,high) | Add '{title}' to my to-do list[ for {due}][ with {priority} priority].; New task: {title}[, due {due}][, priority {priority}]; I have to {title}[ by {due}]. Add a task. | task_id:code | The task was added as {task_id}.
complete_task | Mark a task as done. | task_id:code | Mark task {task_id} as done.; I finished task {task_id}.; Complete {task_id}.; Check off {task_id}. | status:enum(done) | Task {task_id} is {status}.
get_recipe | Find a recipe. | dish:food servings?:int(1,12) diet?:enum(vegan,vegetarian,any) | How do I cook {dish}[ for {servings} people]?; Find a {diet} recipe for {dish}[ for {servings}].; Give me a recipe for {dish}[ that serves {servings}]. | minutes:int(10,180) first_step:phrase | It takes {minutes} minutes. First: {first_step}.
log_workout | Log a workout. | activity:enum(running,cycling,swimming,rowing,yoga,walking) minutes:int(5,180) distance?:number | Log {minutes} minutes of {activity}[ over {distance} km].; I did {activity} for {minutes} minutes[, {distance} km].; Record a workout: {activity}, {minutes} minutes. | calories:int(40,1500) | Logged. You burned {calories} calories.
send_money | Transfer money to someone. | recipient:person amount:number currency:currency note?:phrase | Send {amount} {currency} to {recipient}[ with the note '{note}'].; Transfer {amount} {currency} to {recipient}[, note: {note}].; Pay {recipient} {amount} {currency}[ for {note}]. | transfer_id:code | {amount} {currency} went to {recipient}. The transfer id is {transfer_id}.
ship_order | Ship an order to an address. | order_id:code address:object(street:street,city:city,zip:zip) | Ship order {order_id} to {address}.; Send order {order_id} to this address: {address}. | tracking:code | Order {order_id} is on its way. The tracking number is {tracking}.
add_contact | Add a contact. | contact:object(name:person,phone:phone,email:email) group?:enum(family,friends,work) | Add a contact: {contact}[. Group: {group}]; Save a new contact with {contact}[ in the group {group}]. | contact_id:code | The contact was saved as {contact_id}.
draw_chart | Draw a chart from numbers. | values:list(integer,2,6) kind:enum(bar,line,pie) title?:phrase | Draw a {kind} chart of {values}[ titled '{title}'].; Make a {kind} chart with the values {values}[ and the title '{title}'].; Plot {values} as a {kind} chart. | image:path | The chart is in {image}.
invite_people | Invite people to an event. | event:phrase people:list(person,1,4) | Invite {people} to '{event}'.; Send invitations for '{event}' to {people}.; Ask {people} to come to {event}. | invited:int(1,4) | {invited} people were invited.
roll_dice | Roll dice. | sides:int(4,100) count?:int(1,10) | Roll a {sides} sided die[ {count} times].; Roll[ {count}] dice with {sides} sides.; Throw a d{sides}. | total:int(1,100) | You rolled {total}.
get_random_number | Get a random number in a range. | low:int(0,50) high:int(51,1000) | Give me a random number between {low} and {high}.; Pick a number from {low} to {high}. | number:int(0,1000) | Your number is {number}.
"""


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    params: tuple[tuple[str, str, bool], ...]  # name, kind, required
    requests: tuple[str, ...]
    result: tuple[tuple[str, str], ...]
    answer: str


def _params(text: str) -> tuple[tuple[str, str, bool], ...]:
    pairs = (item.split(":", 1) for item in text.split())
    return tuple((name.rstrip("?"), kind, not name.endswith("?")) for name, kind in pairs)


def _fields(text: str) -> tuple[tuple[str, str], ...]:
    """`a:int(1,2) b:enum(x y,z)`: the blanks inside brackets belong to the kind."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text + " "):
        depth += (char == "(") - (char == ")")
        if char == " " and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return tuple((name, kind) for name, kind in (part.split(":", 1) for part in parts if part))


def _parse(line: str) -> Tool:
    name, description, params, requests, result, answer = (
        part.strip() for part in line.split(" | ")
    )
    phrases = tuple(phrase.strip() for phrase in requests.split(";"))
    return Tool(name, description, _params(params), phrases, _fields(result), answer)


CATALOGUE: tuple[Tool, ...] = tuple(_parse(line) for line in LINES.strip().splitlines())
