"""`ds4cli chat`: a conversation whose past can be edited.

request.py       what the command line asked for
loop.py          messages and commands, one after the other
once.py          one message into a kept chat, for scripts
commands.py      the slash commands
console.py       what the user sees of a conversation
attachments.py   files that go with the next message
calls.py         the dialogue about tool calls
clipboard.py     the system's, and the terminal's
conversation.py  what is said, and the session that follows it
transcript.py    turns, lines and branches; no mlx
journal.py       a chat's file
prompt.py        where messages come from
markdown.py      replies on a terminal
shelf.py         where chats lie on disk
editor.py        the user's editor
"""
